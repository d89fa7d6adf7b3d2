"""The next batch of a sink waits while one of its tables is written again too fast, and for nobody who asks for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from cdc import metrics
from cdc.catalog import Catalog
from cdc.config import WriterChoice
from cdc.position import Position
from cdc.targets.published_record import Published, TargetState
from pipelines.engine_decision import EngineLimits
from pipelines.runtime.cut_requests import CUT, CutRequests
from pipelines.runtime.replay_pause import ReplayPauses
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.runtime.throttle import ASK_EVERY, LONGEST, BatchThrottle, CommitRate, ThrottleState
from pipelines.sink_lifecycle import SinkRunner, State
from pipelines.sink_parts import SinkParts
from tests.fixtures.waiting import until
from tests.pipelines.shop_pipeline import END, ShopPipeline, change, make_shop
from tests.pipelines.spark_starts import spark_with
from tests.pipelines.test_large_range_query import append_large

MIB = 1 << 20


class Clock:
    """A time that moves when it is told to."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def paced(bound: int, clock: Clock, took: float = 0.25, **tables: int) -> CommitRate:
    """After a batch that began now and took so many seconds."""
    pace = CommitRate(bound, clock)
    pace.start_batch()
    clock.now += took
    pace.start_batch()
    for table, nbytes in tables.items():
        pace.add_rewritten(table, nbytes)
    pace.end_batch()
    return pace


def test_the_table_of_which_most_is_written_again_says_when_the_next_batch_may_begin() -> None:
    clock = Clock()
    pace = paced(10 * MIB, clock, orders=25 * MIB, items=24 * MIB)

    assert pace.throttle == BatchThrottle(2.5, "orders", 25 * MIB)
    assert pace.rewritten == 49 * MIB
    assert pace.seconds_left == pytest.approx(2.25)
    clock.now += 2.25
    assert pace.seconds_left == 0
    pace.start_batch()
    pace.end_batch()
    assert pace.throttle is None
    assert (pace.seconds_left, pace.rewritten) == (0, 0)


def test_a_table_within_its_bound_slows_nothing_down() -> None:
    pace = paced(10 * MIB, Clock(), took=2.5, orders=25 * MIB)

    assert (pace.throttle, pace.seconds_left) == (None, 0)


def test_no_batch_waits_longer_than_the_longest_cadence_nor_at_all_without_a_bound() -> None:
    assert paced(1, Clock(), orders=1 << 40).seconds_left == pytest.approx(LONGEST - 0.25)
    assert paced(0, Clock(), orders=1 << 40).seconds_left == 0


def test_a_wait_ends_when_somebody_wants_the_batch_or_the_sink_ends() -> None:
    wanted: list[bool] = []
    pace = paced(1, Clock(), orders=1 << 40)
    asks, ends = ThrottleState(pace, lambda: bool(wanted)), ThrottleState(pace, lambda: False)
    for resting, ended in ((asks, lambda: wanted.append(True)), (ends, ends.stop)):
        assert resting.is_waiting
        waits = Thread(target=resting.wait)
        waits.start()
        ended()
        waits.join(timeout=ASK_EVERY * 20)
        assert not waits.is_alive()
        assert not resting.is_waiting


def test_what_was_wanted_of_one_batch_is_not_of_the_next() -> None:
    wanted, pace = [True, False], paced(1, Clock(), orders=1 << 40)
    resting = ThrottleState(pace, wanted.pop)
    assert resting.is_waiting
    wanted.append(True)
    pace.start_batch()
    pace.add_rewritten("orders", 1 << 40)
    pace.end_batch()
    assert not resting.is_waiting
    wanted.append(False)
    pace.start_batch()
    pace.add_rewritten("orders", 1 << 40)
    pace.end_batch()
    assert resting.is_waiting


def test_a_table_that_slows_its_sink_down_is_told_and_no_more_when_it_does_not() -> None:
    figures, clock = metrics.Metrics(), Clock()
    progress = SinkFigures("shop", "lake", figures)
    progress.record_published(Published(7, 0), lag=None, rows={})
    progress.commit_rate = paced(MIB, clock, **{"shop.orders": 12 * MIB})
    progress.record_duration(0.25)
    told = progress.to_sink()
    assert told is not None
    assert (told.state, told.reason) == (
        "running",
        "a batch begins every 12.0 s, because each batch rewrites 12.6 MB of shop.orders",
    )
    assert figures.value(metrics.CADENCE, "shop", "lake", "shop.orders") == 12.0

    progress.commit_rate.start_batch()
    progress.commit_rate.end_batch()
    progress.record_duration(0.25)
    told = progress.to_sink()
    assert told is not None
    assert told.reason is None
    assert figures.value(metrics.CADENCE, "shop", "lake", "shop.orders") == 0.0
    assert figures.value(metrics.REWRITTEN_BYTES, "shop", "lake") == 12 * MIB


@pytest.fixture(name="ground")
def _ground(tmp_path: Path) -> ShopPipeline:
    """With a lake that has all of the log, and one transaction more in it; its merges rewrite files."""
    ground = make_shop(tmp_path / "shop")
    lake, *others = ground.definition.sinks
    rewriting = lake.model_copy(update={"writer": WriterChoice.COPY_ON_WRITE})
    ground.definition = ground.definition.model_copy(update={"sinks": (rewriting, *others)})
    ground.drive("lake")
    put(ground, 1)
    return ground


def put(ground: ShopPipeline, number: int) -> int:
    """Append one transaction over both tables."""
    position = END + number * 100
    items = change(position, 1, 7, f"i{number}", op="u", of=16385)
    ground.append(position, [change(position, 0, 1, f"o{number}", op="u"), items])
    return position


def size_of(ground: ShopPipeline) -> int:
    """Bytes of the files of the larger table."""
    tables = (DeltaTable(f"{ground.folder}/lake/shop/{name}") for name in ("orders", "items"))
    return max(sum(table.get_add_actions().column("size_bytes").to_pylist()) for table in tables)


@contextmanager
def running(
    ground: ShopPipeline,
    max_rewrite: int,
    *,
    once: bool = False,
    session: SparkSession | None = None,
    rows: int = 1_000,
) -> Iterator[tuple[SinkRunner, Catalog]]:
    """The lake as the apply process has it, without a session before Spark is there."""
    wanted = ground.definition.sinks[0].model_copy(update={"max_rewrite": max_rewrite})
    with Catalog.open(ground.definition.catalog.url) as catalog:
        parts = SinkParts(
            CutRequests(catalog, "shop"),
            ReplayPauses(catalog, "shop"),
            metrics.Metrics(),
            spark_with(session),
            limits=EngineLimits(slice_rows=rows),
        )
        query = SinkRunner(ground.definition, wanted.unthrottled if once else wanted, parts)
        query.step()
        try:
            yield query, catalog
        finally:
            query.stop()


def position_of(query: SinkRunner) -> int:
    told = query.progress.to_sink()
    assert told is not None
    assert told.state == "running", told.reason
    return told.position


def check_whole(ground: ShopPipeline, upto: int, note: str) -> None:
    """One cut, with nothing lost."""
    record = ground.lake_of().published()
    assert record is not None
    assert record.position == upto
    assert {(t.position, t.state) for t in record.tables.values()} == {(upto, TargetState.STREAMING.value)}
    held = ground.lake()
    assert {row["id"]: row["note"] for row in held["shop.orders"]}[1] == f"o{note}"
    assert {row["id"]: row["note"] for row in held["shop.items"]}[7] == f"i{note}"
    assert len(held["shop.orders"]) == 50


def test_batches_of_a_table_over_the_bound_begin_later_and_nothing_is_lost(ground: ShopPipeline) -> None:
    seconds = 4.0
    with running(ground, int(size_of(ground) / seconds)) as (query, _):
        began = time.monotonic()
        assert position_of(query) == END + 100
        told = query.progress.to_sink()
        assert told is not None
        assert told.reason is not None
        assert "a batch begins every " in told.reason
        assert told.reason.endswith(" MB of shop.orders")
        for number in (2, 3):
            put(ground, number)
        assert not query.apply_small_range()
        assert position_of(query) == END + 100
        until(query.apply_small_range, "the next batch", every=0.01)
        # it began at `seconds` after the first one's beginning, which lies before `began` by what that took
        assert time.monotonic() - began > seconds / 3
    check_whole(ground, END + 300, "3")


def test_without_a_bound_and_when_a_run_is_to_end_no_batch_waits(ground: ShopPipeline) -> None:
    with running(ground, 0) as (query, _):
        put(ground, 2)
        assert query.apply_small_range()
    put(ground, 3)
    with running(ground, 1, once=True) as (query, _):
        assert query.has_applied(Position(END + 300))
        put(ground, 4)
        assert query.apply_small_range()
    check_whole(ground, END + 400, "4")


def test_who_asks_for_a_cut_does_not_wait_for_the_cadence(ground: ShopPipeline) -> None:
    with running(ground, 1) as (query, catalog):
        assert not query.apply_small_range()
        put(ground, 2)
        assert not query.apply_small_range()
        command = catalog.commands.post("shop", CUT, {"sink": "lake", "position": END + 200})
        until(query.apply_small_range, "the cut's batch", seconds=LONGEST / 4)
        answered = catalog.commands.get(command)
        assert answered is not None
        assert answered.result is not None
        assert answered.result["record"]["position"] == END + 200
        put(ground, 3)
        assert not query.apply_small_range()
        assert position_of(query) == END + 200
    check_whole(ground, END + 200, "2")


def test_a_batch_that_waiting_would_not_make_larger_does_not_wait(ground: ShopPipeline) -> None:
    with running(ground, 1, rows=2) as (query, _):
        put(ground, 2)
        assert not query.apply_small_range()
        put(ground, 3)
        until(query.apply_small_range, "a full batch and the one behind it", seconds=LONGEST / 4)
    check_whole(ground, END + 300, "3")


def test_a_sink_that_rests_is_paused_and_stopped_at_once(ground: ShopPipeline) -> None:
    with running(ground, 1) as (query, catalog):
        put(ground, 2)
        assert not query.apply_small_range()
        assert catalog.leases.acquire("pause shop/lake", "elsewhere 1 1a2b3c4d", 60.0)
        began = time.monotonic()
        query.step()
        assert not query.has_applied(Position(1))
        assert time.monotonic() - began < LONGEST / 4
    check_whole(ground, END + 100, "1")


@pytest.mark.slow
def test_a_streaming_query_rests_behind_its_batch_until_it_is_wanted_or_stopped(
    ground: ShopPipeline, spark: SparkSession
) -> None:
    append_large(ground, END + 150)
    with running(ground, 1, session=spark) as (query, catalog):

        def arrived() -> bool:
            query.step()
            return query.state is State.STREAMING

        until(arrived, "the first batch of the stream", every=0.2)
        put(ground, 2)
        catalog.commands.post("shop", CUT, {"sink": "lake", "position": END + 200})
        until(lambda: position_of(query) == END + 200, "the cut's batch", seconds=LONGEST / 2)
        put(ground, 3)
        with pytest.raises(AssertionError, match="a batch that may not begin"):
            until(lambda: position_of(query) > END + 200, "a batch that may not begin", seconds=4)
        began = time.monotonic()
        query.stop()
        assert time.monotonic() - began < LONGEST / 4
    check_whole(ground, END + 200, "2")
