"""Progress: how late a sink is told to be, while it goes on, while it is stuck and while there is nothing to do."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from threading import Event

import pytest

from cdc import metrics
from cdc.catalog import Catalog
from cdc.errors import SinkUnavailable
from cdc.targets.published_record import Published, TableRecord, TargetState
from pipelines.runtime.sink_status_reporter import LATE, ProgressReporter, SinkFigures
from tests.fixtures.waiting import until


class Clock:
    """A time that moves when it is told to."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def _clock() -> Clock:
    return Clock()


@pytest.fixture(name="progress")
def _progress(clock: Clock) -> SinkFigures:
    return SinkFigures("shop", "lake", metrics.Metrics(), clock)


def lag(progress: SinkFigures) -> float:
    told = progress.to_sink()
    assert told is not None
    return told.lag_seconds


def record(position: int, committed_at: float) -> Published:
    return Published(position, int(committed_at * 1e6), {})


def test_the_lag_is_that_of_the_last_batch_that_had_rows(progress: SinkFigures) -> None:
    progress.record_published(record(7, 999.0), lag=0.4, rows={1: 3})
    assert lag(progress) == 0.4


def test_the_lag_grows_while_a_batch_is_not_published_however_often_it_is_tried(
    progress: SinkFigures, clock: Clock
) -> None:
    progress.record_published(record(7, 999.0), lag=0.4, rows={1: 3})
    progress.start_batch(9)
    clock.now += 50
    progress.record_failure(SinkUnavailable("no answer"))
    progress.record_published(record(7, 999.0), lag=None, rows={})  # opened again, where it stood
    progress.start_batch(9)
    clock.now += 50
    assert lag(progress) == 100

    progress.record_published(record(9, 1_001.0), lag=99.0, rows={1: 1})
    clock.now += 50
    assert lag(progress) == 99.0


def test_a_batch_without_rows_shows_that_nothing_is_late_any_more(progress: SinkFigures, clock: Clock) -> None:
    progress.record_published(record(7, 999.0), lag=3_600.0, rows={1: 3})
    clock.now = 1_010.5
    progress.record_published(record(8, 1_010.0), lag=None, rows={})  # a heartbeat
    assert lag(progress) == pytest.approx(0.5)


def test_a_batch_without_rows_never_makes_a_sink_later_than_it_was(progress: SinkFigures, clock: Clock) -> None:
    progress.record_published(record(7, 999.0), lag=0.4, rows={1: 3})
    clock.now += 900
    progress.record_published(record(8, 999.0), lag=None, rows={})
    assert lag(progress) == 0.4


def test_a_sink_catches_up_while_it_is_late(progress: SinkFigures) -> None:
    assert not progress.is_catching_up  # before it is opened
    progress.record_published(record(7, 999.0), lag=LATE + 1, rows={1: 3})
    assert progress.is_catching_up
    progress.record_failure(SinkUnavailable("no answer"))
    assert not progress.is_catching_up
    progress.record_published(record(8, 999.0), lag=LATE, rows={1: 3})
    assert not progress.is_catching_up


def test_a_sink_catches_up_while_it_copies_a_table(progress: SinkFigures) -> None:
    for state in TargetState:
        copied = TableRecord(1, "shop.item", "/lake/item", 7, 1, state.value)
        progress.record_published(Published(7, 0, {1: copied}), lag=0.4, rows={})
        assert progress.is_catching_up == (state is TargetState.SNAPSHOTTING)


def test_only_batches_with_rows_count_in_the_latency_and_all_of_them_in_the_duration(clock: Clock) -> None:
    figures = metrics.Metrics()
    progress = SinkFigures("shop", "lake", figures, clock)
    for position, rows in ((7, {1: 3}), (8, {}), (9, {1: 1})):
        progress.record_published(record(position, 999.0), lag=0.4, rows=rows)
        progress.record_duration(0.2)
    counts = {name: value for name, labels, value in figures.to_json() if "+Inf" in labels}  # type: ignore[operator]
    assert counts == {"cdc_sink_latency_seconds_bucket": 2, "cdc_apply_duration_seconds_bucket": 3}


def test_a_sink_that_needs_spark_says_so_until_its_first_batch(progress: SinkFigures) -> None:
    progress.record_published(record(7, 999.0), lag=0.4, rows={1: 3})
    told = []
    for awaits_spark, awaits_core in ((False, False), (True, False), (True, True), (False, True), (False, False)):
        progress.awaits_spark, progress.awaits_core = awaits_spark, awaits_core
        sink = progress.to_sink()
        told.append(None if sink is None else sink.reason)
    no_core = "the cluster has given no core for 30 s"
    here = f"{no_core}; the apply process takes small batches"
    assert told == [None, "waits for Spark", f"waits for Spark: {no_core}", here, None]


def test_batches_rows_and_seconds_are_counted_by_the_engine_that_applied_them(clock: Clock) -> None:
    figures = metrics.Metrics()
    progress = SinkFigures("shop", "lake", figures, clock)
    progress.record_published(record(6, 999.0), lag=None, rows={})  # read when the sink was opened
    for position, engine in ((7, "here"), (8, "spark"), (9, "spark")):
        progress.record_published(record(position, 999.0), lag=0.4, rows={1: 3, 2: 1}, engine=engine)
        progress.record_duration(position / 2, engine)

    def counted(metric: metrics.Metric) -> list[float | None]:
        return [figures.value(metric, "shop", "lake", engine) for engine in ("here", "spark")]

    assert counted(metrics.ENGINE_BATCHES) == [1, 2]
    assert counted(metrics.ENGINE_ROWS) == [4, 8]
    assert counted(metrics.ENGINE_SECONDS) == [3.5, 8.5]
    assert figures.value(metrics.SINK_IN_SPARK, "shop", "lake") == 1.0


def table(relation: int, position: int) -> TableRecord:
    return TableRecord(relation, f"shop.t{relation}", "/lake", position, position, TargetState.STREAMING)


def test_a_report_writes_what_changed_and_now_and_then_everything(tmp_path: Path) -> None:
    ended, progress = Event(), SinkFigures("shop", "lake", metrics.Metrics())
    with Catalog.open(f"sqlite:///{tmp_path / 'catalog.db'}") as catalog:
        reporter = ProgressReporter(catalog, "shop", metrics.Metrics(), ended)
        reporter.sinks.append(progress)

        def times() -> dict[str, tuple[int, datetime | None]]:
            return {known.topic: (known.position, known.recorded_at) for known in catalog.tables.ls("shop")}

        progress.record_published(Published(1, 1, {1: table(1, 1), 2: table(2, 1)}), lag=0.1, rows={})
        reporter.start()
        try:
            until(lambda: len(times()) == 2, "the first report")
            before = times()
            progress.record_published(Published(2, 2, {1: table(1, 1), 2: table(2, 2)}), lag=0.1, rows={})
            until(lambda: times()["shop.t2"][0] == 2, "the second report")
            assert times()["shop.t1"] == before["shop.t1"]
            reporter._tables.forget()
            until(lambda: times()["shop.t1"] != before["shop.t1"], "a report of everything")
        finally:
            ended.set()
            reporter.join()
