"""Table search, on the index of every engine: pages, the wait for a position, and what refuses a search."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cdc.config import DeltaSinkDefinition
from cdc.errors import ConfigError, CutUnavailable, PositionNotReached, SinkUnavailable, UnknownName
from cdc.position import Position
from cdc.table import Column, TableSchema, TableState
from cdc.targets.published_record import Published
from cdc.targets.search_query import SearchAnswer, SearchRequest, TableSearch, find_topic, search_table
from cdc.targets.table_query import QueriedSink, QueryRequest, query_tables
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, Row, batch, column, put
from tests.fixtures.search_sinks import search_sink
from tests.fixtures.search_stores import SearchStore, mugs, new_store
from tests.fixtures.waiting import until

FIRST = SearchRequest(table="orders", words="mug", limit=7)
CODE = "6f1f6f0a-0000-0000-0000-000000000001"
TWENTY_DIGITS = (20 << 16 | 10) + 4
VALUES: list[tuple[Column, str | None, Any]] = [
    (column(1, "id", "bigint", oid=20, key=0), "9007199254740993", 9007199254740993),
    (column(2, "item"), "mug", "mug"),
    (column(3, "small", "smallint", oid=21), "-7", -7),
    (column(4, "sold", "boolean", oid=16), "t", True),
    (column(5, "left", "boolean", oid=16), "f", False),
    (column(6, "price", "numeric", oid=1700, typmod=TWENTY_DIGITS), "0.0000000001", "0.0000000001"),
    (column(7, "free", "numeric", oid=1700), "1.50", "1.50"),
    (column(8, "weight", "real", oid=700), "0.1", 0.1),
    (column(9, "length", "double precision", oid=701), "1e+20", 1e20),
    (column(10, "size", "double precision", oid=701), "-Infinity", "-Infinity"),
    (column(11, "rate", "real", oid=700), "NaN", "NaN"),
    (column(12, "born", "date", oid=1082), "2026-01-31", "2026-01-31"),
    (column(13, "made", "timestamp", oid=1114), "2026-01-31 12:00:00.5", "2026-01-31T12:00:00.500000"),
    (column(14, "sent", "timestamptz", oid=1184), "2026-01-31 12:00:00+00", "2026-01-31T12:00:00+00:00"),
    (column(15, "image", "bytea", oid=17), "\\x00ff", "\\x00ff"),
    (column(16, "note", "jsonb", oid=3802), '{"a": [1, 2.50]}', '{"a": [1, 2.50]}'),
    (column(17, "number", "shop.count", oid=90_001, type_kind="d", base_type_oid=23), "12", 12),
    (column(18, "tags", "text[]", oid=1009), '{blue,NULL,"a b"}', ["blue", None, "a b"]),
    (column(19, "counts", "bigint[]", oid=1016), "{1,NULL}", [1, None]),
    (column(20, "prices", "numeric[]", oid=1231, typmod=TWENTY_DIGITS), "{1.5000000000}", ["1.5000000000"]),
    (column(21, "weights", "real[]", oid=1021), "{0.1,NaN}", [0.1, "NaN"]),
    (column(22, "moments", "timestamp[]", oid=1115), '{"2026-01-31 12:00:00"}', ["2026-01-31T12:00:00"]),
    (column(23, "code", "uuid", oid=2950), CODE, CODE),
    (column(24, "none", "integer", oid=23), None, None),
    (column(25, "owner", "oid", oid=26), "4294967295", 4294967295),
    (column(26, "term", "interval", oid=1186), "1 mon", "1 mon"),
]
"""Column, its text as Postgres prints it, and the JSON value of a search and of a query."""


def pages(store: SearchStore, request: SearchRequest = FIRST) -> list[SearchAnswer]:
    found = [search_table(store.definition, request)]
    while found[-1].next is not None:
        found.append(search_table(store.definition, replace(request, after=found[-1].next)))
    return found


def test_pages_have_every_row_once_and_the_best_first(search_store: SearchStore) -> None:
    search_store.publish(mugs(range(1, 31)), 20)
    found = pages(search_store)

    assert [len(page.rows) for page in found] == [7, 7, 7, 7, 2]
    rows = [row for page in found for row in page.rows]
    assert sorted(int(row.key[0] or 0) for row in rows) == list(range(1, 31))
    assert [row.score for row in rows] == sorted((row.score for row in rows), reverse=True)
    assert {page.position for page in found} == {Position(20)}
    assert pages(search_store, replace(FIRST, limit=30))[0].next is None


def test_a_token_continues_only_its_own_search_at_its_own_position(search_store: SearchStore) -> None:
    search_store.publish(mugs(range(20)), 20)
    token = search_table(search_store.definition, FIRST).next
    assert token is not None
    for text in ("nonsense", "é", token[:-4], f"{token}AAAA"):
        with pytest.raises(ConfigError, match="malformed page token"):
            search_table(search_store.definition, replace(FIRST, after=text))
    with pytest.raises(ConfigError, match="belongs to another search"):
        search_table(search_store.definition, replace(FIRST, after=token, words="cup"))

    search_store.publish(mugs([21], 25), 40)

    with pytest.raises(CutUnavailable, match="belongs to 0/14, but the table is at 0/28"):
        search_table(search_store.definition, replace(FIRST, after=token))


@pytest.mark.parametrize("place", [[0, "x"], [1 << 60, "x"], [1], ["x", "y", "z"], [{}]])
def test_a_token_with_a_place_that_no_page_has_is_refused(search_store: SearchStore, place: list[Any]) -> None:
    search_store.publish(mugs(range(20)), 20)
    token = search_table(search_store.definition, FIRST).next or ""
    content = json.loads(urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    forged = urlsafe_b64encode(json.dumps([*content[:2], place]).encode()).decode().rstrip("=")

    with pytest.raises(ConfigError):
        search_table(search_store.definition, replace(FIRST, after=forged))


def test_a_search_waits_until_the_sink_has_published_the_position(search_store: SearchStore) -> None:
    search_store.publish(mugs([1]), 20)
    with TableSearch(search_store.definition, replace(FIRST, min_position="0/28", timeout=60)) as search:
        assert search.attempt() is None
        assert 0 < search.pause <= 0.05

        search_store.publish(mugs([2], 30), 40)

        found = search.attempt()
    assert found is not None
    assert (sorted(row.key[0] or "" for row in found.rows), found.position) == (["1", "2"], Position(40))


def test_a_search_ends_with_the_present_position_after_its_time(search_store: SearchStore) -> None:
    search_store.publish(mugs([1]), 20)

    with pytest.raises(PositionNotReached, match=r"is at 0/14: it did not reach 0/15 within 0.1 s"):
        search_table(search_store.definition, replace(FIRST, min_position="0/15", timeout=0.1))


def test_a_search_waits_for_an_index_and_a_table_that_do_not_exist_yet(search_store: SearchStore) -> None:
    request = replace(FIRST, min_position="0/14", timeout=60)
    with pytest.raises(SinkUnavailable):
        search_table(search_store.definition, replace(request, timeout=0))
    found: list[SearchAnswer] = []
    waiting = Thread(target=lambda: found.append(search_table(search_store.definition, request)))
    with TableSearch(search_store.definition, request) as search:
        assert search.attempt() is None
        waiting.start()
        search_store.publish([put(1, "cup", 5)], 10, replace(ORDERS, relation=2, name="items"))
        assert search.attempt() is None

        search_store.publish(mugs([1]), 20)

        assert until(search.attempt, "the table").position == Position(20)
    waiting.join()
    assert [row.key for row in found[0].rows] == [("1",)]


def test_an_unknown_table_does_not_wait_for_the_time_to_end(search_store: SearchStore) -> None:
    search_store.publish(mugs([1]), 20)

    with pytest.raises(UnknownName, match="no table called 'none'") as caught:
        search_table(search_store.definition, replace(FIRST, table="none", min_position="0/14", timeout=1e6))
    assert caught.value.fix == "choose one of these tables: shop.orders"
    with pytest.raises(UnknownName, match="no search sink called 'lake'") as caught:
        search_table(search_store.definition, replace(FIRST, sink="lake"))
    assert "'find'" in caught.value.fix


def test_an_lsn_is_of_the_epoch_of_the_sink(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.publish(mugs([1]), Position.of(20, epoch=2))
    for text, is_reached in (("0/14", True), ("0/15", False), ("1:0/15", True), ("2:0/14", True), ("2:0/15", False)):
        with TableSearch(store.definition, replace(FIRST, min_position=text, timeout=60)) as search:
            assert (search.attempt() is not None) == is_reached, text
    with pytest.raises(ConfigError):
        search_table(store.definition, replace(FIRST, min_position="nonsense"))


def test_a_table_that_is_copied_has_not_reached_any_position(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.publish(mugs([1]), 20, replace(ORDERS, state=TableState.SNAPSHOTTING))

    with pytest.raises(PositionNotReached, match="is at 0/14 and is snapshotting: it did not reach 0/A"):
        search_table(store.definition, replace(FIRST, min_position="0/A", timeout=0))


def test_pages_of_a_server_go_through_keys_that_it_cannot_sort(tmp_path: Path, opensearch: Any) -> None:
    schema = replace(ORDERS, columns=(column(1, "id", key=0), column(2, "item")))
    store = new_store(tmp_path, search_sink(opensearch))
    rows = [
        replace(put(n, "mug", 10, ordinal=n), key=(key,), after={1: key, 2: "mug"})
        for n, key in enumerate([*("k" * 9_000 + str(n) for n in range(8)), *map(str, range(8))])
    ]
    store.publish(rows, 20, schema)

    found = [row.key for page in pages(store, replace(FIRST, limit=3)) for row in page.rows]

    assert sorted(found) == sorted(row.key for row in rows)
    store.sink.close()


def test_rows_of_a_server_with_one_score_are_in_the_order_of_their_keys(tmp_path: Path, opensearch: Any) -> None:
    store = new_store(tmp_path, search_sink(opensearch))
    store.publish([put(n, "mug", 10, ordinal=20 - n) for n in range(20, 0, -1)], 20)

    assert [row.key for page in pages(store) for row in page.rows] == [(str(n),) for n in range(1, 21)]
    store.sink.close()


@pytest.mark.parametrize(
    ("table", "topic"), [("shop.a", "shop.a"), ("a", "shop.a"), ("b", None), ("old.b", "old.b"), ("c", None)]
)
def test_a_name_means_the_one_table_that_has_it(table: str, topic: str | None) -> None:
    assert find_topic(["shop.a", "shop.b", "old.b"], table) == topic


def row_of(values: list[tuple[Column, str | None, Any]]) -> tuple[TableSchema, Row]:
    texts = {column.id: text for column, text, _ in values}
    return replace(ORDERS, columns=tuple(column for column, _, _ in values)), Row((texts[1] or "",), 10, texts)


def found_row(store: SearchStore) -> dict[str, Any]:
    (found,) = json.loads(json.dumps(search_table(store.definition, FIRST).to_json()))["rows"]
    assert found["key"] == [VALUES[0][1]]
    row: dict[str, Any] = found["row"]
    return row


def exact(row: dict[str, Any]) -> dict[str, str]:
    """The JSON of each value: true is not 1."""
    return {name: json.dumps(value) for name, value in row.items()}


def test_a_search_returns_the_same_json_values_as_a_query(search_store: SearchStore, tmp_path: Path) -> None:
    schema, row = row_of(VALUES)
    search_store.publish([row], 20, schema)
    path = str(tmp_path / "lake/{schema}/{table}")
    lake = DeltaSink(DeltaSettings("lake", path))
    lake.open("log-1")
    lake.publish(Published(20, 0, {1: lake.apply(batch([row], 0, 20, schema, generation=1))}))
    names = [column.name for column in schema.columns]
    sink = DeltaSinkDefinition(type="delta", name="lake", path=path)
    sql = f"select {', '.join(names)} from orders"
    (queried,) = query_tables(QueriedSink(sink), QueryRequest(sql=sql)).rows

    assert exact(found_row(search_store)) == exact({column.name: value for column, _, value in VALUES})
    assert exact(found_row(search_store)) == exact(dict(zip(names, queried, strict=True)))


@pytest.mark.parametrize("engine", ["tantivy", "opensearch"])
def test_a_masked_column_is_text_in_a_search(request: pytest.FixtureRequest, tmp_path: Path, engine: str) -> None:
    masks = {"number": "keep_last:2", "sold": "redact"}
    rules = [{"match": "shop.*", "transform": {"mask": masks, "rename": {"small": "little", "number": "count"}}}]
    server = request.getfixturevalue("opensearch") if engine == "opensearch" else None
    store = new_store(tmp_path, server and search_sink(server, {"rules": rules}), rules)
    schema, row = row_of([*VALUES[:5], (column(6, "number", "integer", oid=23), "123", None)])
    store.publish([row], 20, schema)

    shown = {"id": 9007199254740993, "item": "mug", "little": -7, "sold": "***", "left": False, "count": "*23"}
    assert exact(found_row(store)) == exact(shown)
    store.sink.close()
