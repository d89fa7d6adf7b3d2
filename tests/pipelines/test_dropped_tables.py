"""A table that the source dropped ends in every sink: its target keeps the rows, and nothing waits for it or fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from threading import Event
from typing import Any

import pytest

from cdc.catalog import Catalog
from cdc.catalog.reported_state import TableProgress
from cdc.config import load_definition
from cdc.errors import CutUnavailable
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.service.status import pipeline_status
from cdc.table import REMOVED, TableState
from cdc.targets.published_record import TableRecord, TargetState
from cdc.targets.search_reader import open_search
from cdc.targets.table_query import QueryAnswer, QueryRequest, queried_sink, query_tables
from cdc.verify_and_replay_options import Against
from pipelines.range_folder import RangeFolder
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.replay import replay
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import ProgressReporter, SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from pipelines.verification.verify import VerifyOptions, verify
from tests.log.rows import row
from tests.pipelines.shop_pipeline import FIGURES, ITEMS, ORDERS, ShopPipeline, applied_shop, change, schemas

DROP = "the source dropped the table: DROP TABLE shop.items"
DROPPED_AT, END = 1_500, 1_600


def schema_row(position: int, ordinal: int, state: TableState, reason: str, relation: int = ITEMS) -> dict[str, Any]:
    """A version of shop.items."""
    version = replace(schemas()[1], relation=relation, oid=relation, state=state, reason=reason)
    payload = version.to_json()
    return row(position, ordinal, op="s", relation=relation, topic="shop.items", key=None, after=None, payload=payload)


def made_again(position: int, ordinal: int) -> list[dict[str, Any]]:
    """A new table with the name shop.items and a complete copy of its one row."""
    copied = {"relation": 7, "topic": "shop.items"}
    return [
        schema_row(position, ordinal, TableState.LIVE, "", 7),
        change(position, ordinal + 1, 1, "anew") | copied,
        row(position, ordinal + 2, op="g", key=None, after=None, payload=str(position).encode(), **copied),
    ]


def dropped_shop(sink: str = "lake") -> ShopPipeline:
    """A pipeline whose table shop.items changed once more and was dropped, in one range with changes of shop.orders."""
    shop = applied_shop(sink)
    last = change(DROPPED_AT, 0, 7, "last", op="u", of=ITEMS)
    shop.append(DROPPED_AT, [last, schema_row(DROPPED_AT, 1, TableState.DROPPED, DROP)])
    shop.append(END, [change(END, 0, 1, "goes on", op="u")])
    shop.drive(sink, END)
    return shop


def published(shop: ShopPipeline) -> dict[int, TableRecord]:
    record = shop.lake_of().published()
    assert record is not None
    return dict(record.tables)


@contextmanager
def opened(shop: ShopPipeline) -> Iterator[SinkLoop]:
    """The loop of the Delta sink."""
    sink = shop.definition.sinks[0]
    with Catalog.open(shop.definition.catalog.url) as catalog, closing(build_sink(sink)) as target:
        fold = RangeFolder(LogReader(shop.definition.log.path), sink.name, sink.tables)
        loop = SinkLoop(target, fold, CutRequests(catalog, "shop"), SinkFigures("shop", sink.name, FIGURES))
        loop.open()
        yield loop
        loop.drain()


def query(shop: ShopPipeline, sql: str, at: str = "published") -> QueryAnswer:
    return query_tables(queried_sink(shop.definition, "lake"), QueryRequest(sql=sql, at=at))


def test_a_dropped_table_keeps_its_last_rows_and_holds_nothing_back() -> None:
    shop = dropped_shop()
    ended = published(shop)[ITEMS]
    assert (ended.state, ended.position) == (TargetState.DROPPED, END)
    assert ended.reason == f"{DROP}; the target keeps the rows"
    assert {item["id"]: item["note"] for item in shop.lake()["shop.items"]} == {7: "last", 8: "too"}
    with opened(shop) as loop:
        assert (loop.consumed_position, loop.lagging_tables, loop.needs_reopen) == (END, [], False)


def test_an_index_keeps_the_documents_of_a_dropped_table() -> None:
    shop = dropped_shop("find")
    assert {item["id"]: item["note"] for item in shop.found()["shop.items"]} == {"7": "last", "8": "too"}
    sink = next(sink for sink in shop.definition.sinks if sink.type == "search")
    record = open_search(sink).published
    assert record is not None
    assert record.tables[ITEMS].state == TargetState.DROPPED
    assert replay(shop.definition, ReplayOptions(sink="find")).ok
    assert {item["id"]: item["note"] for item in shop.found()["shop.items"]} == {"7": "last", "8": "too"}


def test_queries_of_other_tables_do_not_mention_a_dropped_one_and_its_rows_are_read_at_latest() -> None:
    shop = dropped_shop()
    answer = query(shop, "SELECT count(*) FROM shop.orders").to_json()
    assert (answer["rows"], answer["cut"]["apart"]) == ([[50]], {})
    with pytest.raises(CutUnavailable, match="dropped at") as refused:
        query(shop, "SELECT * FROM shop.items")
    assert refused.value.fix == "use '--at latest' to read every table as it is now"
    assert query(shop, "SELECT note FROM shop.items WHERE id = 7", "latest").rows == [["last"]]
    assert query(shop, "SELECT note FROM shop.items WHERE id = 7", str(Position(1_400))).rows == [["later"]]


def test_a_replay_builds_a_dropped_table_from_the_log_and_succeeds() -> None:
    shop = dropped_shop()
    before = shop.lake()
    report = replay(shop.definition, ReplayOptions(sink="lake"))
    assert report.ok
    assert {table.topic: table.state for table in report.tables} == {
        "shop.orders": TargetState.STREAMING, "shop.items": TargetState.DROPPED
    }  # fmt: skip
    assert shop.lake() == before
    with opened(shop) as loop:
        assert loop.lagging_tables == []


def test_a_comparison_with_the_log_leaves_a_dropped_table_out() -> None:
    report = verify(dropped_shop().definition, VerifyOptions(against=Against.LOG, sinks=("lake",)))
    assert {table.topic: table.equal for table in report.tables} == {"shop.orders": True}


def test_a_table_that_had_stopped_before_its_drop_ends_quietly_and_says_what_is_missing() -> None:
    shop = applied_shop()
    stop = schema_row(DROPPED_AT, 0, TableState.NEEDS_RESYNC, "something was not sent")
    shop.append(DROPPED_AT, [stop, change(DROPPED_AT, 1, 1, "goes on", op="u")])
    shop.drive("lake", DROPPED_AT)
    assert published(shop)[ITEMS].state == TargetState.FAILED
    shop.append(END, [schema_row(END, 0, TableState.DROPPED, DROP)])
    with opened(shop) as loop:
        loop(None, Position(END))
        assert loop.needs_reopen
    with opened(shop) as loop:
        loop.catch_up_all(None)
        assert loop.consumed_position == END
    assert published(shop)[ITEMS].state == TargetState.DROPPED


def test_a_table_made_again_takes_the_name_and_a_replay_of_it_leaves_nothing_of_the_old_one() -> None:
    shop = dropped_shop()
    shop.append(1_700, made_again(1_700, 0))
    shop.drive("lake", 1_700)
    stopped = published(shop)[7]
    assert stopped.state == TargetState.FAILED
    assert "'cdc replay SINK --tables shop.items'" in (stopped.reason or "")

    assert replay(shop.definition, ReplayOptions(sink="lake", tables=("shop.items",))).ok
    assert {r: table.state for r, table in published(shop).items()} == dict.fromkeys((ORDERS, 7), TargetState.STREAMING)
    assert query(shop, "SELECT id, note FROM shop.items").rows == [[1, "anew"]]


def test_a_new_sink_gets_the_successor_of_a_dropped_table_and_not_the_table() -> None:
    shop = applied_shop(upto=0)
    shop.append(1_700, [schema_row(1_700, 0, TableState.DROPPED, DROP), *made_again(1_700, 1)])
    with opened(shop) as loop:
        loop(None, Position(1_700))
    assert {r: table.state for r, table in published(shop).items()} == dict.fromkeys((ORDERS, 7), TargetState.STREAMING)


def test_the_catalog_shows_a_dropped_table_until_the_definition_loses_it() -> None:
    shop = dropped_shop()

    def report(catalog: Catalog) -> dict[str, str]:
        """Have a process report the sink, and return topic → state of its tables in the catalog."""
        record, ended = shop.lake_of().published(), Event()
        assert record is not None
        reporter, figures = ProgressReporter(catalog, "shop", FIGURES, ended), SinkFigures("shop", "lake", FIGURES)
        figures.record_published(record, lag=0.0, rows={})
        reporter.sinks = [figures]
        ended.set()
        reporter.run()
        return {table.topic: table.state for table in catalog.tables.ls("shop")}

    with Catalog.open(shop.definition.catalog.url) as catalog:
        catalog.tables.record("shop", [TableProgress("lake", "shop.earlier_name", "streaming", None, 1, None, 0)])
        assert report(catalog) == {"shop.items": "dropped", "shop.orders": "streaming"}
        problems = pipeline_status(catalog, "shop", datetime.now(UTC)).problems
        assert [problem.subject for problem in problems if problem.subject.startswith("table")] == []
        shop.append(1_700, [schema_row(1_700, 0, TableState.DROPPED, REMOVED)])
        shop.drive("lake", 1_700)
        assert report(catalog) == {"shop.orders": "streaming"}


def test_a_dropped_table_that_its_rules_stopped_is_dropped_again_under_the_earlier_rules() -> None:
    shop = dropped_shop()
    path = shop.folder / "shop.yaml"
    before = path.read_text()
    mask = "rules: [{match: shop.items, transform: {mask: {note: redact}}}]"
    path.write_text(before.replace("name: lake,", f"name: lake, {mask},"))
    for text, state in ((path.read_text(), TargetState.FAILED), (before, TargetState.DROPPED)):
        path.write_text(text)
        shop.definition = load_definition(path)
        with opened(shop) as loop:
            assert loop.record.tables[ITEMS].state == state
