"""Sinks over a log that is compacted and trimmed: they hold what sinks that read every change hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc.catalog import Catalog
from cdc.config import EngineChoice
from cdc.errors import ConfigError, LogTrimmed
from cdc.log import consumers
from cdc.log.consumers import Consumer
from cdc.log.reader import LogReader
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from cdc.service.status import pipeline_status
from cdc.targets.published_record import TargetState
from pipelines.range_folder import RangeFolder
from pipelines.replaying.plan import ReplayOptions, plan_replay
from pipelines.replaying.replay import _LazySession, _ReplayRun, replay
from pipelines.runtime.consumer_registration import REPLAY, registered_for_replay, target_uuid
from pipelines.runtime.cut_requests import CUT, CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.runtime.spark_session import has_delta
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.contract import Sink
from pipelines.source.data_source import rows_between
from tests.fixtures.waiting import until
from tests.pipelines.replaying.rebuilt_tables import delta, rebuilt, tables_of
from tests.pipelines.shop_pipeline import FIGURES, ITEMS, ORDERS
from tests.pipelines.trimmed_log import KEEP, NOBODY, TrimmedAndWholeLog, apply_all, running_sink


@pytest.fixture
def logs(tmp_path: Path) -> TrimmedAndWholeLog:
    """Two logs with one history."""
    return TrimmedAndWholeLog(tmp_path)


@pytest.fixture
def catalog(logs: TrimmedAndWholeLog) -> Iterator[Catalog]:
    with Catalog.open(logs.cut.definition.catalog.url) as catalog:
        yield catalog


@pytest.fixture
def lake(logs: TrimmedAndWholeLog) -> Iterator[Sink]:
    with closing(build_sink(logs.cut.definition.sinks[0])) as sink:
        yield sink


@pytest.mark.parametrize("sink", ["lake", "find"])
def test_a_new_sink_begins_with_what_was_compacted(logs: TrimmedAndWholeLog, sink: str) -> None:
    logs.append(5)
    held = logs.compact(NOBODY)
    logs.append(5)
    assert Position(0) < logs.oldest <= held.horizon
    apply_all(logs.cut, sink)
    assert (logs.cut.lake() if sink == "lake" else logs.cut.found()) == logs.expected(sink)


def test_a_sink_that_stands_before_the_oldest_change_catches_up(logs: TrimmedAndWholeLog) -> None:
    end = logs.append(6)
    logs.cut.drive("lake", end)
    before = logs.cut.lake()
    logs.append(5)
    logs.compact(NOBODY)
    logs.append(3)
    assert end < logs.oldest
    apply_all(logs.cut)
    assert before != logs.cut.lake() == logs.expected()


def test_a_sink_registers_and_is_waited_for(logs: TrimmedAndWholeLog) -> None:
    end = logs.append(6)
    apply_all(logs.cut)
    (consumer,) = consumers.list_consumers(logs.root)
    lake = logs.cut.definition.sinks[0]
    assert (consumer.name, consumer.position) == ("lake", end)
    assert consumer.uuid == target_uuid(LogReader(logs.root).log_id, lake)
    logs.append(6)
    horizon = logs.compact(KEEP).horizon
    assert logs.oldest <= end < horizon
    apply_all(logs.cut)
    logs.compact(KEEP)
    assert logs.oldest > end


def forgotten(logs: TrimmedAndWholeLog) -> int:
    """A sink that stands where deletes are forgotten that it has not seen; where it stands."""
    end = logs.append(4)
    logs.cut.drive("lake", end)
    for _ in range(9):  # runs are merged once what is newer is more
        last = logs.append(60, each=60)
        consumers.register(logs.root, Consumer("other", "other", Position(last)))
        if end < logs.compact(NOBODY).floor:
            break
    assert end < logs.oldest
    return end


def test_a_sink_that_is_too_late_is_told_nobody_waits_for_it_and_it_goes_on_after_a_replay(
    logs: TrimmedAndWholeLog, catalog: Catalog
) -> None:
    end = forgotten(logs)
    before = logs.cut.lake()
    with running_sink(logs.cut) as query, running_sink(logs.cut, "find") as other:
        for _ in range(5):
            query.step()
            other.step()
        told, good = query.progress.to_sink(), other.progress.to_sink()
    assert told is not None
    assert good is not None
    assert (told.state, told.position, good.state) == ("failed", end, "running")
    for progress in (told, good):
        catalog.sinks.record("shop", progress)
    problems = {p.subject: (p.code, p.remedy) for p in pipeline_status(catalog, "shop", datetime.now(UTC)).problems}
    assert problems["sink lake"] == ("CDC-4004", "rebuild the sink: 'cdc replay lake'")
    assert "sink find" not in problems
    assert logs.cut.lake() == before
    assert logs.cut.found() == logs.expected("find")

    assert replay(logs.cut.definition, ReplayOptions(sink="lake")).ok
    logs.append(2)
    apply_all(logs.cut)
    assert logs.cut.lake() == logs.expected()


@contextmanager
def changing(logs: TrimmedAndWholeLog) -> Iterator[None]:
    """Beside the block the log grows and is compacted and trimmed, again and again."""
    done = Event()

    def change() -> None:
        while not done.wait(0.05):
            logs.append(2)
            logs.compact(NOBODY)

    thread = Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("sink", ["lake", pytest.param("find", marks=pytest.mark.slow)])
def test_a_replay_beside_compaction_and_trimming_builds_what_was_there(logs: TrimmedAndWholeLog, sink: str) -> None:
    logs.append(5)
    logs.compact(NOBODY)
    apply_all(logs.cut, sink)
    before = logs.oldest
    with changing(logs):
        report = replay(logs.cut.definition, ReplayOptions(sink=sink))
    assert report.ok
    assert before < logs.oldest
    logs.append(2)
    apply_all(logs.cut, sink)
    assert (logs.cut.lake() if sink == "lake" else logs.cut.found()) == logs.expected(sink)


def test_a_replay_holds_what_it_reads_and_lets_go_of_it(logs: TrimmedAndWholeLog) -> None:
    logs.append(5)
    first = logs.compact(NOBODY)
    logs.append(4)
    view = LogReader(logs.root)
    with registered_for_replay(logs.root, view, logs.cut.definition.sinks[0]):
        (held,) = consumers.list_consumers(logs.root)
        assert (held.name, held.position, held.pinned) == (f"lake{REPLAY}", first.horizon, first.version)
        logs.append(4)
        assert logs.compact(KEEP).horizon > first.horizon
        assert logs.oldest <= first.horizon
    assert consumers.list_consumers(logs.root) == []


def test_a_state_of_the_past_that_was_folded_away_is_refused(logs: TrimmedAndWholeLog) -> None:
    end = logs.append(5)
    apply_all(logs.cut)
    logs.append(5)
    logs.compact(NOBODY)
    into = str(logs.cut.folder / "past")
    with pytest.raises(ConfigError, match="is before"):
        replay(logs.cut.definition, ReplayOptions(sink="lake", end=str(Position(1_200)), into=into))
    with pytest.raises(ConfigError, match=f"is at {Position(end)}, but the log"):
        replay(logs.cut.definition, ReplayOptions(sink="lake", tables=("orders",)))


class Overtaken(LogReader):
    """A view that is moved while its log is compacted again; once, between a batch's planning and its reading."""

    def __init__(self, logs: TrimmedAndWholeLog, overtaken_at: int = 3) -> None:
        super().__init__(logs.root)
        self._twins, self._moves, self._overtaken_at = logs, 0, overtaken_at

    def refresh(self) -> None:
        """Move on, once behind another compaction."""
        self._moves += 1
        if self._moves == self._overtaken_at:
            self._twins.append(5)
            self._twins.compact(NOBODY)
        super().refresh()


def loop_over(
    view: LogReader, catalog: Catalog, sink: Sink, tables: str = "*.*", engine: EngineChoice = EngineChoice.AUTO
) -> SinkLoop:
    fold = RangeFolder(view, "lake", (tables,))
    fold.choice = engine
    loop = SinkLoop(sink, fold, CutRequests(catalog, "shop"), SinkFigures("shop", "lake", FIGURES))
    loop.open()
    return loop


def test_a_batch_that_ends_where_none_can_end_any_more_is_planned_again(
    logs: TrimmedAndWholeLog, catalog: Catalog, lake: Sink
) -> None:
    logs.append(5)
    logs.compact(NOBODY)
    loop = loop_over(Overtaken(logs), catalog, lake)
    with pytest.raises(LogTrimmed, match="cannot be read up to"):
        loop.advance()
    loop.advance()
    loop.advance()
    loop.drain()
    assert logs.cut.lake() == logs.expected()


@pytest.mark.parametrize(
    ("sink", "overtaken_at"), [pytest.param("lake", 2, marks=pytest.mark.slow), ("lake", 3), ("find", 2)]
)
def test_a_replay_whose_batch_was_overtaken_plans_it_again(
    logs: TrimmedAndWholeLog, catalog: Catalog, sink: str, overtaken_at: int
) -> None:
    logs.append(5)
    apply_all(logs.cut, sink)
    logs.compact(NOBODY)
    plan = plan_replay(logs.cut.definition, ReplayOptions(sink=sink))
    logs.append(3)
    oldest = logs.oldest
    plan = replace(plan, log=Overtaken(logs, overtaken_at))
    with _LazySession(logs.cut.definition) as spark:
        _ReplayRun(logs.cut.definition, plan, catalog, spark, lambda _: None).replace_target()
    assert oldest < logs.oldest
    apply_all(logs.cut, sink)
    assert (logs.cut.lake() if sink == "lake" else logs.cut.found()) == logs.expected(sink)


def test_a_sink_whose_batch_was_overtaken_tries_again(logs: TrimmedAndWholeLog) -> None:
    logs.append(5)
    logs.compact(NOBODY)
    overtaken = LogTrimmed("the log cannot be read up to there")

    def fail() -> None:
        raise overtaken

    with running_sink(logs.cut) as query:
        query.step()
        query._attempt(fail)
        told = query.progress.to_sink()
        assert told is not None
        assert told.state == "failed"

        def works_again() -> bool:
            query.step()
            found = query.progress.to_sink()
            return found is not None and found.state == "running"

        until(works_again, "another batch")


def test_no_batch_ends_at_a_cut_that_was_folded_away(logs: TrimmedAndWholeLog, catalog: Catalog, lake: Sink) -> None:
    end = logs.append(5)
    held = logs.compact(NOBODY)
    asked = catalog.commands.post("shop", CUT, {"sink": "lake", "position": end - 40})
    loop = loop_over(LogReader(logs.root), catalog, lake)
    loop.advance()
    assert loop.position == held.horizon
    loop.drain()
    said = catalog.commands.get(asked)
    assert said is not None
    assert said.result == {"reason": "passed"}


def stopped(logs: TrimmedAndWholeLog, lake: Sink, at: int) -> None:
    """Say of shop.orders that it stands still at a position, as it does in a sink that could not merge it there."""
    record = lake.open(LogReader(logs.root).log_id)
    assert record is not None
    orders = replace(record.tables[ORDERS], position=at, state=TargetState.FAILED.value, reason="CDC-3000 a value")
    lake.publish(replace(record, tables={**record.tables, ORDERS: orders}))


def test_a_table_that_stayed_behind_for_too_long_stops_alone(
    logs: TrimmedAndWholeLog, catalog: Catalog, lake: Sink
) -> None:
    floor = Position(0)
    while floor <= 1_200:
        end = logs.append(60, each=60)
        apply_all(logs.cut)
        floor = logs.compact(KEEP).floor
    stopped(logs, lake, 1_200)
    loop = loop_over(LogReader(logs.root), catalog, lake)
    assert (loop.position, loop.consumed_position) == (end, 1_200)
    for table in loop.lagging_tables:
        loop.catch_up(table, None)
    end = logs.append(2)
    loop(None, Position(end))
    loop.drain()
    record = lake.open(LogReader(logs.root).log_id)
    assert record is not None
    orders, items = record.tables[ORDERS], record.tables[ITEMS]
    assert (orders.state, orders.position, items.state, items.position) == ("failed", 1_200, "streaming", end)
    assert orders.reason is not None
    assert orders.reason.startswith("CDC-4004")
    assert orders.reason.endswith("'cdc replay lake'")


@pytest.mark.slow
def test_spark_reads_from_a_trimmed_log_what_one_process_reads(spark: SparkSession, logs: TrimmedAndWholeLog) -> None:
    logs.append(5)
    logs.compact(NOBODY)
    logs.append(3)
    view = LogReader(logs.root)
    end = view.durable or Position(0)
    order = [("position", "ascending"), ("ordinal", "ascending")]
    right = pa.Table.from_batches(view.rows(Position(0), end), LOG_SCHEMA).sort_by(order)
    frames = rows_between(spark, view, ("shop.*",), Position(0), end), spark.read.format("cdc").load(str(logs.root))
    for frame in frames:
        assert frame.toArrow().cast(LOG_SCHEMA).sort_by(order).equals(right)


def test_a_batch_that_was_planned_before_a_trim_is_folded_from_what_is_left(
    spark: SparkSession, logs: TrimmedAndWholeLog, catalog: Catalog, lake: Sink
) -> None:
    end = Position(logs.append(5))
    planned = rows_between(spark, LogReader(logs.root), ("shop.*",), Position(0), end)
    logs.compact(NOBODY)
    loop = loop_over(LogReader(logs.root), catalog, lake, engine=EngineChoice.SPARK)
    lake.attach(spark)
    loop(planned, end)
    loop.drain()
    assert logs.cut.lake() == logs.expected()


@pytest.mark.parametrize("engine", [EngineChoice.AUTO, pytest.param(EngineChoice.SPARK, marks=pytest.mark.slow)])
def test_a_table_that_stayed_behind_catches_up_over_what_was_folded(
    spark: SparkSession, logs: TrimmedAndWholeLog, catalog: Catalog, lake: Sink, engine: EngineChoice
) -> None:
    logs.cut.drive("lake", 1_200)
    end = Position(logs.append(5))
    others = loop_over(LogReader(logs.root), catalog, lake, "shop.items")
    others(None, end)
    others.drain()
    stopped(logs, lake, 1_200)
    logs.compact(NOBODY)
    assert logs.oldest > 1_200
    end = Position(logs.append(2))
    loop = loop_over(LogReader(logs.root), catalog, lake, engine=engine)
    (orders,) = loop.lagging_tables
    loop.catch_up(orders, spark)
    loop(rows_between(spark, LogReader(logs.root), ("*.*",), loop.position, end), end)
    loop.drain()
    assert logs.cut.lake() == logs.expected()


@pytest.mark.slow  # the default run has test_latest_rows.py for a whole log, and the batch above for a trimmed one
@pytest.mark.parametrize("frames", [False, True])
def test_a_table_is_built_in_spark_from_what_was_folded_and_what_came_behind(
    spark: SparkSession, logs: TrimmedAndWholeLog, frames: bool
) -> None:
    if frames and not has_delta(spark):
        pytest.skip("this Spark has no Delta")
    logs.append(5)
    logs.compact(NOBODY)
    logs.append(3)
    with closing(delta(logs.cut, "lake")) as sink:
        if frames:
            sink.attach(spark)
        built = rebuilt(logs.cut, sink, ("shop.*",), spark, frames=frames)
    assert tables_of(built) == logs.expected()
