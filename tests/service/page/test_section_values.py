"""Values of the page's sections: what is shown first, what instead of a number, and which buttons there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cdc.catalog import AWAITS_SPARK, NO_CORE, Catalog
from cdc.service.log_status_records import Compaction, LogState, LogStatus
from cdc.service.page import section_values
from cdc.service.status import PipelineStatus, pipeline_status
from cdc.service.table_status import TableStatus
from cdc.snapshot.backfill_documents import BackfillRequest
from tests.service.pipeline import NAME, copying, fill, new_catalog


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with new_catalog(tmp_path) as opened:
        fill(opened)
        yield opened


@pytest.fixture
def status(catalog: Catalog) -> PipelineStatus:
    return pipeline_status(catalog, NAME, datetime.now(UTC))


def test_totals_are_of_the_slowest_sink_and_of_all_sinks(status: PipelineStatus) -> None:
    lag, rate, tables, slot = section_values.totals(status, {"source": 1234.0})
    assert (lag.value, lag.unit, lag.note) == ("0.61", "s", "commit to visible")
    assert (rate.value, tables.value, slot.note) == ("1\u202f234", "5/5", "WAL retained by Postgres")


def test_a_stalled_sink_shows_no_outdated_lag(status: PipelineStatus) -> None:
    sink = status.sinks[0]
    assert section_values.sink_edge(sink, {}, {}).instead_of_lag is None
    assert (
        section_values.sink_edge(replace(sink, stalled_seconds=33.0), {}, {}).instead_of_lag == "no new value for 33 s"
    )
    for reason in (AWAITS_SPARK, f"{AWAITS_SPARK}: {NO_CORE}"):
        waiting = replace(sink, stalled_seconds=33.0, reason=reason)
        assert section_values.sink_edge(waiting, {}, {}).instead_of_lag == AWAITS_SPARK


def test_tables_that_need_attention_are_first() -> None:
    def table(sink: str, topic: str, state: str) -> TableStatus:
        return TableStatus(sink, topic, state, None, None, None, 0)

    tables = [table("", "shop.a", "streaming"), table("lake", "shop.b", "failed"), table("lake", "shop.a", "streaming")]
    rows = section_values.table_rows(tables, ["find", "lake"])
    assert [(row.schema, row.name) for row in rows] == [("shop", "b"), ("shop", "a")]
    assert (rows[0].source, [found and found.state for found in rows[1].sinks]) == (None, [None, "streaming"])


def test_a_running_backfill_has_buttons_unless_the_service_is_read_only(catalog: Catalog) -> None:
    copying(catalog, "shop.orders", BackfillRequest(("shop.orders",), sink="lake"), state="snapshotting", rows=1)
    status = pipeline_status(catalog, NAME, datetime.now(UTC))
    (row,) = section_values.backfill_rows(status, "shop.yaml", may_change=True)
    pause, cancel = row.actions
    assert row.subject == "backfill of shop.orders, for lake alone"
    assert row.command.endswith("-c shop.yaml")
    assert (pause.path, pause.question) == (f"/api/v1/pipelines/{NAME}/backfills/{row.status.id}/pause", "")
    assert cancel.question.startswith("Cancel backfill")
    (reading,) = section_values.backfill_rows(status, "shop.yaml", may_change=False)
    assert reading.actions == ()


def test_the_last_compaction_has_its_age_and_what_it_did() -> None:
    compaction = Compaction(at="2026-01-01T00:00:00+00:00", rows=3, changes=2000, seconds=1.5)
    log = LogStatus(at="2026-01-01T00:02:00+00:00", state=LogState.READ, compaction=compaction)
    *_, last = section_values.log_sizes(log)
    assert (last.value, last.unit) == ("2.0", "min ago")
    assert last.note == "2\u202f000 changes read, 3 rows written, in 1.50 s"


def test_the_end_of_a_log_names_the_timeline_after_a_promotion() -> None:
    log = LogStatus(
        at="2026-11-27T12:00:00+00:00", state=LogState.READ, durable="0/C8", timeline=2, switch_point="0/A0"
    )

    assert section_values.log_positions(log)[-1].note.endswith(", timeline 2 since 0/A0")
    assert "timeline" not in section_values.log_positions(replace(log, switch_point=None))[-1].note
