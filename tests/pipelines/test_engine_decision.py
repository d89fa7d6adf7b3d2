"""What applies what waits for a sink, as a table: sizes, the setting, the cores and the last engine decide."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config import EngineChoice
from cdc.log.disk_format import LogFile
from cdc.log.file_selection import MAX_BYTES
from cdc.position import Position
from pipelines.engine_decision import (
    HERE_BYTES,
    MICRO_BATCH_BYTES,
    MICRO_BATCH_ROWS,
    ONE_MACHINE,
    PARTIAL_ROWS,
    SLICE_ROWS,
    SMALL,
    SPARK_BYTES,
    SPARK_ROWS,
    Cores,
    Engine,
    EngineLimits,
    RangeSize,
    Waiting,
    decide,
)

LIMITS = EngineLimits()
FREE, BUSY = Cores(is_cluster=True, free=2), Cores(is_cluster=True, free=0)
NOTHING, FEW, SLICE = RangeSize(), RangeSize(3, 3_000), RangeSize(SLICE_ROWS, 40 << 20)
HUGE, PARTIAL = RangeSize(3_000_000, HERE_BYTES + 1), RangeSize(PARTIAL_ROWS + 1, 1 << 20, PARTIAL_ROWS + 1)
BELOW, ABOVE = RangeSize(SPARK_ROWS, SPARK_BYTES), RangeSize(SPARK_ROWS + 1, 1 << 20)
WIDE, PARTS = RangeSize(9, SPARK_BYTES + 1), RangeSize(PARTIAL_ROWS + 1, 1, PARTIAL_ROWS + 1)
REST = RangeSize(SLICE_ROWS + 1, 1 << 20)
COMPACTED = Waiting(HUGE, HUGE, is_compacted=True)

H, S = Engine.HERE, Engine.SPARK
AUTO = {  # (next batch, backlog): on one machine; with free cores after `here`, after `spark`; without a free core
    (NOTHING, NOTHING): (H, H, H, H),
    (FEW, FEW): (H, H, H, H),
    (SLICE, SLICE): (H, H, H, H),
    (SLICE, REST): (H, H, S, H),
    (SLICE, BELOW): (H, H, S, H),
    (SLICE, ABOVE): (H, S, S, H),
    (FEW, WIDE): (H, S, S, H),
    (SLICE, PARTS): (H, S, S, H),
    (HUGE, HUGE): (S, S, S, S),
    (PARTIAL, PARTIAL): (S, S, S, S),
}
CORES = ((ONE_MACHINE, H), (FREE, H), (FREE, S), (BUSY, H))


def engine(waiting: Waiting, choice: EngineChoice, cores: Cores, last: Engine) -> Engine:
    return decide(waiting, choice, LIMITS, cores, last).engine


@pytest.mark.parametrize("sizes", AUTO, ids=str)
def test_auto_takes_here_what_fits_and_gives_a_backlog_to_a_cluster_with_a_free_core(
    sizes: tuple[RangeSize, RangeSize],
) -> None:
    decided = tuple(engine(Waiting(*sizes), EngineChoice.AUTO, cores, last) for cores, last in CORES)
    assert decided == AUTO[sizes]


def test_a_backlog_that_is_taken_here_for_want_of_a_core_still_asks_for_one() -> None:
    without = decide(Waiting(SLICE, ABOVE), EngineChoice.AUTO, LIMITS, BUSY, H)
    assert (without.engine, without.wants_spark) == (H, True)
    assert "1,000,001 rows in 1,048,576 bytes" in without.spark_reason
    assert not decide(Waiting(SLICE, ABOVE), EngineChoice.AUTO, LIMITS, ONE_MACHINE, S).wants_spark
    assert not decide(Waiting(FEW, FEW), EngineChoice.AUTO, LIMITS, FREE, S).wants_spark


@pytest.mark.parametrize("sizes", AUTO, ids=str)
def test_the_setting_decides_alone_about_ranges_with_rows(sizes: tuple[RangeSize, RangeSize]) -> None:
    for cores, last in product((ONE_MACHINE, FREE, BUSY), Engine):
        assert engine(Waiting(*sizes), EngineChoice.HERE, cores, last) is H
        assert engine(Waiting(*sizes), EngineChoice.SPARK, cores, last) is (S if sizes[1].rows else H)


def test_the_reason_says_what_is_too_large() -> None:
    partial = decide(Waiting(PARTIAL, PARTIAL), EngineChoice.AUTO, LIMITS, ONE_MACHINE, H).spark_reason
    assert partial.startswith("the next batch is too large for this process: 250,001 rows in 1,048,576 bytes")
    assert partial.endswith("250,001 of them in files with partial images")
    compacted = decide(COMPACTED, EngineChoice.AUTO, LIMITS, ONE_MACHINE, H).spark_reason
    assert compacted.startswith("the state of the compacted log is too large for this process: 3,000,000 rows")


def test_an_engine_is_not_left_by_the_size_at_which_it_was_entered() -> None:
    assert SLICE_ROWS < SPARK_ROWS
    assert MAX_BYTES < SPARK_BYTES
    assert SMALL < PARTIAL_ROWS
    entered = RangeSize(SPARK_ROWS + 1, SPARK_BYTES + 1)
    for rows in (SPARK_ROWS, SPARK_ROWS // 2, SLICE_ROWS + 1):
        assert engine(Waiting(SLICE, RangeSize(rows, 1)), EngineChoice.AUTO, FREE, S) is S
    assert engine(Waiting(SLICE, entered), EngineChoice.AUTO, FREE, H) is S


@given(st.integers(0, 3 * SLICE_ROWS), st.integers(0, 2 * SPARK_ROWS))
def test_under_a_steady_load_the_engine_changes_at_most_twice(arriving: int, waiting: int) -> None:
    """A backlog is taken away once, and a load that slices cannot keep up with stays with Spark."""
    used = [H]
    for _ in range(100):
        backlog = RangeSize(waiting, 1)
        used.append(engine(Waiting(SLICE, backlog), EngineChoice.AUTO, FREE, used[-1]))
        waiting -= min(waiting, MICRO_BATCH_ROWS if used[-1] is S else SLICE_ROWS)
        waiting += arriving
    assert sum(before is not after for before, after in pairwise(used)) <= 2


def test_a_micro_batch_takes_a_backlog_whole_where_executors_fold_it() -> None:
    large = MICRO_BATCH_ROWS, MICRO_BATCH_BYTES
    assert LIMITS.micro_batch(EngineChoice.AUTO, is_cluster=True) == large
    assert LIMITS.micro_batch(EngineChoice.SPARK, is_cluster=False) == large
    assert LIMITS.micro_batch(EngineChoice.AUTO, is_cluster=False) == (SLICE_ROWS, MAX_BYTES)


def test_the_size_of_a_range_counts_its_files_whole() -> None:
    files = [
        LogFile(path=str(n), rows=10 * n, size=n, first=Position(n), last=Position(n), segment=0, partial=n > 1)
        for n in (1, 2, 3)
    ]
    assert RangeSize.of(files) == RangeSize(60, 6, 50)
    assert RangeSize.of([]) == NOTHING
