"""Who merges: the choice between the two writers as a pure function of the work and of what merges took."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from pipelines.sinks.contract import Published, SparkAwaited
from pipelines.sinks.delta.file_statistics import DataFile, statistics
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.target import DeltaTarget
from pipelines.sinks.delta.writer_choice import (
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
    rewritten_bytes,
)
from tests.contracts.folded import batch, put

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
        assert costs(factors).choose("t", work, cores).spark


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
    assert WriterCosts().choose("t", LARGE, cores) == WriterDecision(
        by_spark, LARGE.by_spark(cores) if by_spark else LARGE.by_delta_rs()
    )


def test_a_batch_of_the_newest_keys_of_a_huge_table_stays_with_delta_rs() -> None:
    assert not WriterCosts().choose("t", MergeWork(1_000, 100_000, target=50 << 30, candidates=20 * MIB), 64).spark


def test_a_slow_merge_of_one_writer_hands_over_and_the_other_is_not_kept_for_ever() -> None:
    mine, cores, work = WriterCosts(), 8, replace(LARGE, candidates=130 * MIB, target=130 * MIB)
    assert not mine.choose("t", work, cores).spark
    for _ in range(8):
        choice = mine.choose("t", work, cores)
        mine.learn(choice, choice.seconds * (1 if choice.spark else 6))
    assert mine.choose("t", work, cores).spark
    assert mine.factors.delta_rs > SWITCHES_AT

    writers = []
    for _ in range(200):  # the machine has calmed down, which only a merge by delta-rs can show
        choice = mine.choose("t", work, cores)
        mine.learn(choice, choice.seconds)
        writers.append(choice.spark)
    assert not writers[-1]
    assert sum(one != other for one, other in pairwise(writers)) == 1


def test_short_merges_teach_nothing() -> None:
    mine = WriterCosts()
    mine.learn(WriterDecision(spark=False, seconds=LEARNS_FROM / 2), 5.0)
    mine.learn(WriterDecision(spark=True), 5.0)
    assert mine.factors == Factors()
    mine.learn(WriterDecision(spark=False, seconds=SPARK_FIXED), 5.0)
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


def test_written_again_is_what_came_for_what_went() -> None:
    four, three, other = FILES, FILES.slice(1), files((0, 9, 7), (0, 9, 8)).slice(1)

    assert rewritten_bytes(four, four) == 0
    assert rewritten_bytes(three, four) == rewritten_bytes(four, three) == 0
    renamed = other.set_column(0, "path", pa.array(["new"]))
    assert rewritten_bytes(four, pa.concat_tables([three, renamed])) == 1
    assert rewritten_bytes(pa.concat_tables([four, renamed]), three) == 0
    assert rewritten_bytes(three, pa.concat_tables([four.slice(2), renamed])) == 8


def test_a_choice_takes_less_than_a_fifth_of_a_millisecond() -> None:
    found = pa.concat_tables([FILES] * 16)
    source = pa.table({"id": pa.array(range(1_000), pa.int64())})
    mine, took = WriterCosts(), []
    for _ in range(50):
        began = time.thread_time()
        work = MergeWork(1_000, source.nbytes, 20 * MIB, candidates(found, source, ["id"]))
        mine.is_small(work)
        took.append(time.thread_time() - began)
    assert min(took) < 2e-4


def test_a_huge_target_needs_no_spark_for_keys_of_its_small_files_alone(tmp_path: Path) -> None:
    """A file that is not there, and is said to be huge, tells which ones delta-rs opens."""
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}"))
    sink.open("log-1")
    record = sink.apply(batch([put(1, "a", 10), put(2, "b", 11)], 0, 20))
    huge = statistics(pa.table({"id": pa.array([1_000, 9_000], pa.int64())}), ["id"])
    target = DeltaTarget.open(record.target)
    assert target is not None
    target.add([DataFile("huge.parquet", MAX_CANDIDATE_BYTES + 1, 2, huge)], 20)

    sink.apply(batch([put(1, "A", 30), put(5, "c", 31)], 20, 40))
    with pytest.raises(SparkAwaited, match=r"'shop\.orders'"):
        sink.apply(batch([put(1, "B", 50), put(1_001, "d", 51)], 40, 60))
    sink.close()
    assert DeltaTable(record.target).transaction_version(target.app_id) == 40


def test_what_a_batch_had_to_write_again_is_counted_and_what_it_added_is_not(tmp_path: Path) -> None:
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}"))
    sink.open("log-1")
    told = []
    for number, rows in enumerate([[put(1, "a", 10)], [put(2, "new", 30)], [put(1, "A", 50)], []]):
        record = sink.apply(batch(rows, number * 20, number * 20 + 20))
        sink.publish(Published(record.position, 0, {record.relation: record}))
        told.append(sink.commit_rate.rewritten)
    sink.close()

    assert told[0] == told[1] == told[3] == 0
    assert 0 < told[2] < 10_000


def test_what_a_merge_took_is_learned_of_the_writer_that_made_it(tmp_path: Path) -> None:
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}"))
    sink.open("log-1")
    sink.apply(batch([put(1, "a", 10)], 0, 20))
    assert sink.parts.writers.costs.factors == Factors()
    sink.apply(batch([put(n, "b", 30) for n in range(int(LEARNS_FROM * 1e6) + 1)], 20, 40))
    sink.close()
    assert sink.parts.writers.costs.factors.delta_rs != 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize(("factors", "writes"), [(Factors(8, 1 / 8), "Apache-Spark"), (Factors(), "delta-rs")])
def test_auto_merges_by_the_writer_that_was_the_quicker_one(
    tmp_path: Path, spark: SparkSession, factors: Factors, writes: str
) -> None:
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}"), spark)
    sink.open("log-1")
    sink.apply(batch([put(1, "a", 10)], 0, 20))
    sink.parts.writers.costs.factors = factors
    record = sink.apply(batch([put(n, "b", 30) for n in range(30_000)], 20, 40))
    sink.close()

    assert DeltaTable(record.target).history(1)[0]["engineInfo"].startswith(writes)
