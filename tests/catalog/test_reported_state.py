"""Stores of reported state: the last report of each process, sink and table."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

from cdc.catalog import Catalog, ProcessReport, RecordedProgress, SinkProgress, TableProgress
from cdc.catalog.reported_state import RECORD_ALL_EVERY

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def test_a_process_has_one_row(catalog: Catalog) -> None:
    catalog.processes.report(ProcessReport("shop", "reader", 1, "starting"))
    catalog.processes.report(ProcessReport("shop", "reader", 2, "failed", {"code": "CDC-2001"}, [["lag", 1.5]]))
    catalog.processes.report(ProcessReport("other", "reader", 3, "running"))
    (report,) = catalog.processes.ls("shop")
    assert (report.pid, report.state, report.error, report.figures) == (
        2,
        "failed",
        {"code": "CDC-2001"},
        [["lag", 1.5]],
    )
    assert report.reported_at is not None


def test_a_sink_keeps_the_largest_position_and_the_zone_of_its_time(catalog: Catalog) -> None:
    east = NOON.astimezone(timezone(timedelta(hours=5)))
    catalog.sinks.record("shop", SinkProgress("lake", 2**63 - 1, east, 0.25, "streaming"))
    (progress,) = catalog.sinks.ls("shop")
    assert progress.position == 2**63 - 1
    assert progress.committed_at == NOON
    assert progress.committed_at.utcoffset() == timedelta(0)


def test_tables_not_named_stay_as_they_are(catalog: Catalog) -> None:
    first = [TableProgress("", f"shop.t{n}", "snapshot", None, 1, None, n) for n in range(3)]
    catalog.tables.record("shop", first)
    catalog.tables.record("shop", [TableProgress("", "shop.t1", "failed", "no key", 2, 7, 9)])
    catalog.tables.record("shop", [])
    found = catalog.tables.ls("shop")
    assert [(t.topic, t.state, t.rows) for t in found] == [
        ("shop.t0", "snapshot", 0),
        ("shop.t1", "failed", 9),
        ("shop.t2", "snapshot", 2),
    ]


def test_a_table_is_refused_until_it_is_not_and_others_stay_as_they_are(catalog: Catalog) -> None:
    other = [TableProgress(sink, "shop.t1", "streaming", None, 1, None, 5) for sink in ("", "lake")]
    catalog.tables.record("shop", other)
    for refused in ({"shop.bare": "no key", "shop.u": "no right"}, {"shop.bare": "unlogged"}, {}):
        catalog.tables.record_refused("shop", refused)
        found = catalog.tables.ls("shop")
        assert {t.topic: t.reason for t in found if t.state == "refused"} == refused
        assert [t.topic for t in found if t.state == "streaming"] == ["shop.t1", "shop.t1"]


SHOWN = TableProgress("", "shop.t", "streaming", None, 1, None, 50)


def test_a_table_that_only_moved_is_written_after_some_seconds_and_another_change_at_once() -> None:
    recorded, other = RecordedProgress[TableProgress](), replace(SHOWN, topic="shop.other")
    assert recorded.due([SHOWN, other], 100.0) == [SHOWN, other]

    moved, copied = replace(SHOWN, position=2), replace(other, position=2, rows=60)
    assert recorded.due([moved, copied], 101.0) == [copied]
    assert recorded.due([moved, copied], 102.0) == []
    assert recorded.due([moved, copied], 100.0 + RECORD_ALL_EVERY) == [moved, copied]
    recorded.forget()
    assert recorded.due([moved, replace(moved, sink="lake")], 103.0) == [moved, replace(moved, sink="lake")]


def test_a_sink_is_written_with_every_change_also_of_its_position() -> None:
    recorded, sink = RecordedProgress[SinkProgress](), SinkProgress("lake", 1, NOON, 0.1, "running")
    assert recorded.due([sink], 100.0) == [sink]
    assert recorded.due([sink], 101.0) == []
    assert recorded.due([replace(sink, position=2)], 101.0) == [replace(sink, position=2)]
    assert recorded.due([replace(sink, position=2)], 100.0 + RECORD_ALL_EVERY) == [replace(sink, position=2)]
