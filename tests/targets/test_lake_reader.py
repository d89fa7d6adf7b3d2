"""Reading a Delta sink: cdc/targets/lake_reader.py."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cdc.errors import ConfigError, CutUnavailable, SinkUnavailable
from cdc.position import Position
from cdc.targets.lake_reader import Lake, ReadAt, bind_tables, parse_at, with_exact_numbers
from cdc.targets.published_record import Published, TableRecord
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, Row, batch, column, put


def record(relation: int, topic: str) -> TableRecord:
    return TableRecord(relation, topic, f"/lake/{topic}", 20, 1, "streaming")


TABLES = {
    topic: record(n, topic) for n, topic in enumerate(["shop.orders", "shop.items", "stock.items", "shop.Odd one"])
}


@pytest.fixture
def lake(tmp_path):
    """A published cut with the row 1, and a later row 2 that is applied but not published."""
    template = f"{tmp_path}/{{schema}}/{{table}}"
    sink = DeltaSink(DeltaSettings("lake", template))
    sink.open("log-1")
    applied = sink.apply(batch([put(1, "a", 10)], 0, 20, generation=5))
    sink.publish(Published(20, 5, {ORDERS.relation: applied}))
    sink.apply(batch([put(2, "b", 30)], 20, 40))
    return Lake.open(template)


def test_a_query_sees_the_published_cut(lake):
    assert lake.query("select item from shop.orders").read_all().to_pylist() == [{"item": "a"}]


def test_a_query_at_latest_sees_what_is_applied(lake):
    assert lake.query("select count(*) as n from orders", ReadAt.LATEST).read_all().to_pylist() == [{"n": 2}]


@pytest.fixture
def lived(tmp_path):
    """Cuts at 20, 40 and 60, committed 5, 7 and 9 s after 1970; the table stands still at the last of them."""
    template = f"{tmp_path}/{{schema}}/{{table}}"
    sink = DeltaSink(DeltaSettings("lake", template))
    sink.open("log-1")
    first = sink.apply(batch([put(1, "a", 10)], 0, 20, generation=5))
    sink.publish(Published(20, 5_000_000, {ORDERS.relation: first}))
    second = sink.apply(batch([put(1, "A", 30), put(2, "b", 31)], 20, 40))
    sink.publish(Published(40, 7_000_000, {ORDERS.relation: second}))
    stopped = replace(second, state="failed", reason="CDC-3001 a value")
    sink.publish(Published(60, 9_000_000, {ORDERS.relation: stopped}))
    return Lake.open(template)


PAST = [("0/14", ["a"]), ("0/27", ["a"]), ("0/28", ["A", "b"]), ("1970-01-01T00:00:06.5", ["a"]),
        ("1970-01-01 01:00:08+01:00", ["A", "b"]), ("latest", ["A", "b"])]  # fmt: skip
NEVER = [(Position(19), "oldest cut is 0/14"), (Position(61), "newest cut is 0/3C"),
         (datetime(1970, 1, 1, 0, 0, 4, tzinfo=UTC), "oldest cut is 0/14"),
         (datetime(2999, 1, 1), "newest cut is 0/3C"),  # noqa: DTZ001
         (ReadAt.PUBLISHED, "'shop.orders' is not part of the cut: failed")]  # fmt: skip


def test_a_past_cut_is_read_by_position_or_time_and_a_moment_without_one_is_an_error_that_says_why(lived):
    for at, items in PAST:
        found = lived.query("select item from shop.orders order by id", parse_at(at)).read_all()
        assert found["item"].to_pylist() == items, at
    for moment, words in NEVER:
        with pytest.raises(CutUnavailable) as caught:
            lived.query("select * from shop.orders", moment)
        assert words in caught.value.message

    # a record that was found answers any number of queries
    cut = lived.cut(Position(25))

    assert (cut.position, [table.state for table in cut.tables.values()]) == (20, ["streaming"])
    assert lived.query("select count(*) as n from orders", cut).read_all()["n"].to_pylist() == [1]


@pytest.mark.parametrize("text", ["yesterday", "16/", "x/1", "2026-13-01", ""])
def test_a_moment_that_is_none_is_an_error_with_examples(text):
    with pytest.raises(ConfigError) as caught:
        parse_at(text)

    assert "16/B374D848" in caught.value.fix


def test_columns_may_be_qualified_by_either_name(lake):
    found = lake.query("select orders.id, shop.orders.item from shop.orders where orders.id = 1").read_all()

    assert found.to_pylist() == [{"id": 1, "item": "a"}]


def test_a_refused_query_names_the_tables_there_are(lake):
    with pytest.raises(ConfigError) as caught:
        lake.query("select * from nothing")

    assert "shop.orders" in caught.value.fix


def test_a_sink_that_was_never_opened_has_no_record(tmp_path):
    lake = Lake.open(f"{tmp_path}/{{schema}}/{{table}}")

    assert (lake.published(), lake.tables()) == (None, [])


def test_a_missing_target_or_version_is_an_error(lake, tmp_path):
    with pytest.raises(SinkUnavailable):
        lake.read(f"{tmp_path}/nothing")
    with pytest.raises(SinkUnavailable):
        lake.read(lake.tables()[0].target, 99)


@pytest.mark.parametrize(
    ("sql", "expected", "used"),
    [
        ("select * from shop.orders", 'select * from "orders"', ["shop.orders"]),
        ("select * from SHOP.Orders o", 'select * from "orders" o', ["shop.orders"]),
        ("select 'shop.items' from stock.items", "select 'shop.items' from \"stock__items\"", ["stock.items"]),
        ("select 1 from items -- orders", "select 1 from items -- orders", []),
        ('select * from shop."Odd one"', 'select * from "Odd one"', ["shop.Odd one"]),
        ('select * from "shop.orders" o', 'select * from "orders" o', ["shop.orders"]),
        ("select 1e3, 1.5 from orders", 'select 1e3, 1.5 from "orders"', ["shop.orders"]),
        ("select o.id from other.orders o", "select o.id from other.orders o", []),
    ],
)
def test_names_of_tables_become_names_the_engine_knows(sql, expected, used):
    text, found = bind_tables(sql, TABLES)

    assert text == expected
    assert [table.topic for table in found.values()] == used


@pytest.mark.parametrize("pattern", ["*.parquet", "_delta_log/*.json"])
@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_a_record_that_is_damaged_is_an_error_that_names_it(lake, tmp_path, pattern, content):
    for file in (tmp_path / "_cdc" / "published").glob(pattern):
        file.write_bytes(content)
    for reading in (lake.published, lake.cuts, lake.cut, lambda: lake.query("select 1 from orders")):
        with pytest.raises(SinkUnavailable, match=r"the published record .* cannot be read: "):
            reading()


def test_a_file_in_the_place_of_a_target_s_log_is_an_error_that_names_the_target(lake):
    target = lake.tables()[0].target
    shutil.rmtree(f"{target}/_delta_log")
    Path(target, "_delta_log").write_text("a file", encoding="utf-8")
    with pytest.raises(SinkUnavailable, match="has no readable table at"):
        lake.read(target)


EXACT = "12345678901234567890123456789012345678"


@pytest.mark.parametrize(
    ("sql", "has_doubles", "expected"),
    [
        (f"x = {EXACT}", True, f"x = CAST('{EXACT}' AS DECIMAL(38, 0))"),
        (f"x > -{EXACT}.5", False, f"x > -CAST('{EXACT}.5' AS DECIMAL(39, 1))"),
        ("x = 18446744073709551615", False, "x = 18446744073709551615"),
        ("x = 18446744073709551616", False, "x = CAST('18446744073709551616' AS DECIMAL(20, 0))"),
        ("x = 123456789012345.67", False, "x = CAST('123456789012345.67' AS DECIMAL(17, 2))"),
        ("x = 0.30000000000000004", True, "x = 0.30000000000000004"),
        ("x = 0.300000000000000040", True, "x = CAST('0.300000000000000040' AS DECIMAL(18, 18))"),
        ("x = 0.1 OR x < 1.25e300", False, "x = 0.1 OR x < 1.25e300"),
        (f"x = '{EXACT}' -- {EXACT}", False, f"x = '{EXACT}' -- {EXACT}"),
        (f"t{EXACT}.x{EXACT} > 1", False, f"t{EXACT}.x{EXACT} > 1"),
    ],
)
def test_numbers_that_a_double_cannot_hold_become_decimals(sql: str, has_doubles: bool, expected: str) -> None:
    assert with_exact_numbers(sql, has_doubles=has_doubles) == expected


@pytest.mark.parametrize("writer", ["indexed", "copy-on-write"])
def test_numbers_of_38_digits_are_compared_exactly(tmp_path: Path, writer: str) -> None:
    template, first = f"{tmp_path}/{{schema}}/{{table}}", int(EXACT)
    whole = replace(column(3, "price", "numeric", oid=1700), typmod=(38 << 16 | 0) + 4)
    sink = DeltaSink(DeltaSettings("lake", template, Writer(writer)))
    sink.open("log-1")
    rows = [Row((str(n),), 10 + n, {1: str(n), 2: "a", 3: str(first + n)}) for n in range(4)]
    applied = sink.apply(batch(rows, 0, 20, replace(ORDERS, columns=(*ORDERS.columns[:2], whole)), generation=5))
    sink.publish(Published(20, 5, {ORDERS.relation: applied}))
    lake = Lake.open(template)

    def ids(condition: str) -> list[int]:
        found = lake.query(f"SELECT id FROM shop.orders WHERE {condition} ORDER BY id").read_all()
        return [row["id"] for row in found.to_pylist()]

    assert ids(f"price = {first + 2}") == [2]
    assert ids(f"price > {first + 1}.5") == [2, 3]
    assert ids(f"price BETWEEN {first} AND {first + 1}") == [0, 1]
    assert ids(f"price IN ({first + 3}, {first})") == [0, 3]


def test_a_query_of_a_deleted_target_says_how_to_get_it_back(lake: Lake) -> None:
    shutil.rmtree(lake.tables()[0].target)
    with pytest.raises(SinkUnavailable) as refused:
        lake.query("SELECT * FROM shop.orders")
    assert refused.value.fix == (
        "restore the target's files, or rebuild the table: 'cdc replay SINK --tables shop.orders'"
    )
