"""Who merges: the choice between the two writers as a pure function of the work and of what merges took."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sinks.delta.settings import Writer
from pipelines.sinks.delta.writer_costs import (
    LEARNS_FROM,
    MAX_BATCH_BYTES,
    MAX_CANDIDATE_BYTES,
    SPARK_FIXED,
    SWITCHES_AT,
    Factors,
    MergeWork,
    WriterCosts,
    WriterDecision,
    candidates,
)

MIB = 1 << 20
LARGE = MergeWork(rows=10_000, nbytes=4 * MIB, target=450 * MIB, candidates=450 * MIB)


@st.composite
def works(draw: st.DrawFn) -> MergeWork:
    target = draw(st.integers(0, 4 * MAX_CANDIDATE_BYTES))
    rows = draw(st.integers(1, 2_000_000))
    return MergeWork(rows, rows * draw(st.integers(8, 400)), target, draw(st.integers(0, target)))


FACTORS = st.builds(Factors, st.floats(0.125, 8), st.floats(0.125, 8))
CORES = st.integers(1, 256)


def costs(factors: Factors) -> WriterCosts:
    made = WriterCosts()
    made.factors = factors
    return made


@given(works(), FACTORS, CORES)
def test_what_delta_rs_has_no_memory_for_is_sparks_whatever_was_learned(
    work: MergeWork, factors: Factors, cores: int
) -> None:
    too_large = work.nbytes > MAX_BATCH_BYTES or work.candidates > MAX_CANDIDATE_BYTES

    assert work.fits is not too_large
    if too_large:
        assert not costs(factors).is_small(work)
        assert costs(factors).choose("t", work, cores).writer is Writer.SPARK


@given(works(), FACTORS, CORES, st.booleans())
def test_what_is_small_is_never_sparks(work: MergeWork, factors: Factors, cores: int, before: bool) -> None:
    if costs(factors).is_small(work):
        assert not factors.prefer_spark(work, cores, before=before)


@given(works(), FACTORS, CORES, st.integers(1, 512 * MIB))
def test_more_to_read_never_turns_a_choice_to_delta_rs_where_cores_are_many(
    work: MergeWork, factors: Factors, cores: int, more: int
) -> None:
    """Spark writes a byte anew in less time than delta-rs from four cores on, times what was learned."""
    larger = replace(work, target=work.target + more, candidates=work.candidates + more)

    assert larger.by_delta_rs() >= work.by_delta_rs()
    assert larger.by_spark(cores) >= work.by_spark(cores)
    assert larger.by_spark(cores + 1) <= larger.by_spark(cores)
    if cores * factors.delta_rs / factors.spark > 5 and factors.prefer_spark(work, cores, before=False):
        assert factors.prefer_spark(larger, cores, before=False)


@given(works(), CORES, st.floats(0.7, 1.4), st.lists(st.floats(1 / 1.1, 1.1), min_size=2, max_size=8))
def test_estimates_that_waver_by_a_tenth_do_not_change_the_writer_back_and_forth(
    work: MergeWork, cores: int, close: float, noise: list[float]
) -> None:
    factors = Factors(delta_rs=close * work.by_spark(cores) / work.by_delta_rs())
    before, changes = False, 0
    for wavers in noise:
        chosen = replace(factors, delta_rs=factors.delta_rs * wavers).prefer_spark(work, cores, before=before)
        changes, before = changes + (chosen != before), chosen

    assert changes <= 1


@given(st.floats(0.2, 6), st.booleans(), FACTORS)
def test_what_merges_take_is_learned_in_some_twenty_of_them(speed: float, spark: bool, factors: Factors) -> None:
    for _ in range(20):
        factors = factors.learned(speed, spark=spark)
        assert 0.1 < min(factors.delta_rs, factors.spark) <= max(factors.delta_rs, factors.spark) < 8.1

    assert (factors.spark if spark else factors.delta_rs) == pytest.approx(speed, rel=0.03)


@pytest.mark.parametrize(("cores", "by_spark"), [(1, False), (64, True)])
def test_a_large_target_goes_to_spark_where_it_has_the_cores(cores: int, by_spark: bool) -> None:
    assert WriterCosts().choose("t", LARGE, cores) == (
        WriterDecision(Writer.SPARK, LARGE.by_spark(cores))
        if by_spark
        else WriterDecision(Writer.DELTA_RS, LARGE.by_delta_rs())
    )


def test_a_batch_of_the_newest_keys_of_a_huge_table_stays_with_delta_rs() -> None:
    work = MergeWork(1_000, 100_000, target=50 << 30, candidates=20 * MIB)

    assert WriterCosts().choose("t", work, 64).writer is Writer.DELTA_RS


def test_a_slow_merge_of_one_writer_hands_over_and_the_other_is_not_kept_for_ever() -> None:
    mine, cores, work = WriterCosts(), 8, replace(LARGE, candidates=130 * MIB, target=130 * MIB)
    assert mine.choose("t", work, cores).writer is Writer.DELTA_RS
    for _ in range(8):
        choice = mine.choose("t", work, cores)
        mine.learn(choice, choice.seconds * (1 if choice.writer is Writer.SPARK else 6))
    assert mine.choose("t", work, cores).writer is Writer.SPARK
    assert mine.factors.delta_rs > SWITCHES_AT

    writers = []
    for _ in range(200):  # the machine has calmed down, which only a merge by delta-rs can show
        choice = mine.choose("t", work, cores)
        mine.learn(choice, choice.seconds)
        writers.append(choice.writer)
    assert writers[-1] is Writer.DELTA_RS
    assert sum(one != other for one, other in pairwise(writers)) == 1


def test_short_merges_teach_nothing() -> None:
    mine = WriterCosts()
    mine.learn(WriterDecision(Writer.DELTA_RS, seconds=LEARNS_FROM / 2), 5.0)
    mine.learn(WriterDecision(Writer.SPARK), 5.0)
    assert mine.factors == Factors()
    mine.learn(WriterDecision(Writer.DELTA_RS, seconds=SPARK_FIXED), 5.0)
    assert mine.factors != Factors()


def files(*bounds: tuple[int | None, int | None, int]) -> pa.Table:
    low, high, size = zip(*bounds, strict=True)
    return pa.table(
        {
            "path": [f"f{n}" for n in range(len(bounds))],
            "size_bytes": pa.array(size, pa.int64()),
            "min.id": pa.array(low, pa.int64()),
            "max.id": pa.array(high, pa.int64()),
        }
    )


FILES = files((0, 99, 1), (100, 199, 10), (150, 300, 100), (None, None, 1000))


@given(st.lists(st.integers(-50, 400), min_size=1))
def test_files_that_may_hold_a_key_are_those_whose_bounds_meet_the_batchs(keys: list[int]) -> None:
    meets = [low is None or (low <= max(keys) and high >= min(keys)) for low, high in
             zip(FILES["min.id"].to_pylist(), FILES["max.id"].to_pylist(), strict=True)]  # fmt: skip
    expected = sum(size for size, met in zip(FILES["size_bytes"].to_pylist(), meets, strict=True) if met)

    assert candidates(FILES, pa.table({"id": pa.array(keys, pa.int64())}), ["id"]) == expected


@pytest.mark.parametrize("source", [pa.table({"id": ["a"]}), pa.table({"id": [b"x"]}), pa.table({"id": [[1]]})])
def test_a_key_that_cannot_be_compared_with_the_bounds_leaves_every_file(source: pa.Table) -> None:
    assert candidates(FILES, source, ["id"]) == 1111


def test_a_target_without_files_has_none_that_may_hold_a_key() -> None:
    assert candidates(FILES.slice(0, 0), pa.table({"id": [1]}), ["id"]) == 0


def test_of_several_key_columns_each_one_rules_files_out() -> None:
    both = FILES.append_column("min.no", pa.array([1, 1, 9, 1])).append_column("max.no", pa.array([5, 5, 9, 5]))
    source = pa.table({"id": [150, 160], "no": [1, 2], "text": ["x", "y"]})

    assert candidates(both, source, ["id", "no", "text"]) == 1010
