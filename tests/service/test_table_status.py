"""Where tables stand while they are copied: queued, snapshotting, catching_up, streaming, and what can go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cdc.catalog import Catalog, TableProgress
from cdc.service.log_contents import tables_by_topic
from cdc.service.status import pipeline_status
from cdc.service.table_status import TableStatus, table_lines
from cdc.snapshot.backfill_documents import BackfillRequest, BackfillState, TableBackfillState
from tests.service.pipeline import LOG_END, NAME, copy_log, copying, fill, new_catalog

TOPIC = "shop.orders"
COPY = BackfillRequest((TOPIC,), resync=True, epoch=0)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    """A healthy pipeline; the log's mark says that the rows of one table are being copied."""
    with new_catalog(tmp_path) as opened:
        fill(opened)
        opened.tables.record(NAME, [TableProgress("", TOPIC, "snapshotting", None, LOG_END, None, 0)])
        yield opened


def places(catalog: Catalog) -> dict[str, TableStatus]:
    status = pipeline_status(catalog, NAME, datetime.now(UTC))
    return {table.sink: table for table in status.tables if table.topic == TOPIC}


def end(catalog: Catalog, job: int, state: str, **more: Any) -> None:
    work = BackfillState(state, {TOPIC: TableBackfillState("done" if state == "done" else "snapshotting", rows=500)})
    catalog.commands.finish(job, work.to_json() | more, ok=state == "done")


def test_a_table_goes_from_queued_to_streaming(catalog: Catalog) -> None:
    assert places(catalog)[""].state == "queued"
    job = copying(catalog, TOPIC, COPY)
    assert places(catalog)[""].state == "queued"
    work = BackfillState(
        "snapshotting", {TOPIC: TableBackfillState("snapshotting", rows=1_000, estimate=4_000, seconds=2.0)}
    )
    catalog.commands.record(job, work.to_json())
    source = places(catalog)[""]
    assert (source.state, source.rows) == ("snapshotting", 1_000)
    assert source.progress is not None
    assert (source.progress.share, source.progress.seconds_left) == (0.25, 6.0)
    end(catalog, job, "done")
    assert places(catalog)[""].state == "catching_up"
    catalog.tables.record(NAME, [TableProgress("", TOPIC, "streaming", None, LOG_END, None, 4_000)])
    assert (places(catalog)[""].state, places(catalog)[""].progress) == ("streaming", None)


def test_a_sink_is_not_shown_as_streaming_before_all_rows_are_in_the_log(catalog: Catalog) -> None:
    assert places(catalog)["lake"].state == "snapshotting"
    catalog.tables.record(NAME, [TableProgress("lake", TOPIC, "failed", "CDC-3001 why", 1, 1, 1)])
    assert places(catalog)["lake"].state == "failed"


@pytest.mark.parametrize("state", ["cancelled", "failed"])
def test_a_copy_that_ended_early_leaves_the_table_failed_with_the_way_out(catalog: Catalog, state: str) -> None:
    error = {"code": "CDC-2003", "message": "refused", "suggestion": "grant it"}
    end(catalog, copying(catalog, TOPIC, COPY), state, **({"error": error} if state == "failed" else {}))
    (problem,) = pipeline_status(catalog, NAME, datetime.now(UTC)).problems
    assert problem.subject == f"table {TOPIC}"
    again = f"copy the table again: 'cdc tables resync {TOPIC}'"
    failed = ("CDC-2003", f"grant it; then {again}")
    assert (problem.code, problem.remedy) == (failed if state == "failed" else (None, again))
    copying(catalog, TOPIC, COPY)
    assert places(catalog)[""].state == "queued"


def test_a_backfill_beside_a_table_that_streams_shows_its_progress_and_leaves_the_state(catalog: Catalog) -> None:
    copying(
        catalog,
        "shop.customers",
        BackfillRequest(("shop.customers",)),
        state="snapshotting",
        rows=5,
        estimate=10,
        seconds=1.0,
    )
    status = pipeline_status(catalog, NAME, datetime.now(UTC))
    (source,) = (t for t in status.tables if t.topic == "shop.customers" and not t.sink)
    assert source.state == "streaming"
    assert source.progress is not None
    assert [backfill.state for backfill in status.backfills] == ["snapshotting"]


def test_rows_of_a_copy_that_a_reader_took_over_are_counted_from_its_beginning(catalog: Catalog) -> None:
    end(catalog, copying(catalog, TOPIC, COPY), "done")
    catalog.tables.record(NAME, [TableProgress("", TOPIC, "streaming", None, LOG_END, None, 20)])
    assert places(catalog)[""].rows == 500


def test_part_of_a_table_or_one_sink_of_it_is_not_its_copy(catalog: Catalog) -> None:
    for request in (BackfillRequest((TOPIC,), where="false"), BackfillRequest((TOPIC,), sink="lake")):
        end(catalog, copying(catalog, TOPIC, request), "done")
    assert places(catalog)[""].state == "queued"


def test_a_paused_copy_is_a_paused_table(catalog: Catalog) -> None:
    job = copying(catalog, TOPIC, COPY)
    catalog.commands.record(job, BackfillState("paused", {TOPIC: TableBackfillState("snapshotting", rows=5)}).to_json())
    assert places(catalog)[""].state == "paused"


def test_lines_of_tables_join_the_log_with_what_is_shown(catalog: Catalog, tmp_path: Path) -> None:
    status = pipeline_status(catalog, NAME, datetime.now(UTC))
    assert {line.relation for line in table_lines(status.tables, {})} == {None}
    copy_log(tmp_path)
    lines = {line.topic: line for line in table_lines(status.tables, tables_by_topic(tmp_path / "log"))}
    assert (lines[TOPIC].relation, lines[TOPIC].state) == (101, "queued")
    assert [(sink.sink, sink.state) for sink in lines["shop.products"].sinks] == [
        ("find", "streaming"),
        ("lake", "streaming"),
    ]
