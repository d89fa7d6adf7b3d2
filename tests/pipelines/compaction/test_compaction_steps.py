"""Compaction of a log on disk: readers of the compacted log, trimmed or not, get the result of the whole log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.log import consumers
from cdc.log.compacted_table import CompactedState, read_compacted_state
from cdc.log.consumers import Consumer
from cdc.log.disk_format import LogFile
from cdc.log.reader import LogReader, read_file
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.compaction.compaction_steps import CompactionLimits, CompactionResult, compact
from tests.benchmarks import log_amplification
from tests.fixtures.examples import examples
from tests.pipelines.cold_log import SPREAD, append, folded, histories, interleaved, log_writer, transactions
from tests.pipelines.fold_model import Row, Source, Target, log_row, message_row, to_arrow

START = Position(0)
ONE_SEGMENT = SegmentLimits(size=1 << 30, age=3600.0)
QUICK = replace(log_amplification.SMALL, keys=8_000, segment=40_000, commit=120)


def compacted_state(root: Path) -> CompactedState:
    found = read_compacted_state(root)
    assert found is not None
    return found


def sorted_rows(files: Sequence[LogFile]) -> pa.Table:
    """Rows of files in the order of a run."""
    found = [LOG_SCHEMA.empty_table(), *(read_file(file, START, file.last) for file in files)]
    return pa.concat_tables(found).sort_by([(name, "ascending") for name in ("relation", "position", "ordinal")])


def read_log(root: Path, after: Position = START) -> pa.Table:
    log = LogReader(root)
    return pa.Table.from_batches(log.rows(after, log.durable or START), LOG_SCHEMA)


def trim(writer: LogWriter, root: Path) -> Position:
    """Trim every segment before the horizon except the newest."""
    files, horizon = LogReader(root).every_file(), compacted_state(root).horizon
    newest = max(file.segment for file in files)
    late = min([newest, *(file.segment for file in files if file.last > horizon)])
    gone = [file for file in files if file.segment < late]
    end = max((file.last for file in gone), default=START)
    writer.trim({file.segment for file in gone}, end)
    return end


def key(place: int, ordinal: int, op: str, name: str, **fields: object) -> Row:
    return log_row(1, (place, ordinal), op, key=[name], **fields)


@examples(2)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_log_compacted_and_trimmed_many_times_folds_like_the_whole_log(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    root, random = tmp_path_factory.mktemp("cold"), Random(seed)
    rows = interleaved(histories(seed, 5))
    writer = log_writer(root)
    trimmed = START
    left = transactions(rows)
    while left:
        size = random.randint(1, 20)
        some, left = left[:size], left[size:]
        append(writer, some)
        if random.random() < 0.4:
            limits = CompactionLimits(parts=random.choice([1, 3]), most=random.choice([1, 20, 10**6]))
            compact(None, root, everything=random.random() < 0.3, limits=limits)
            trimmed = max(trimmed, trim(writer, root)) if random.random() < 0.6 else trimmed

    assert folded(read_log(root)) == folded(to_arrow(rows))
    log = LogReader(root)
    assert log.oldest == trimmed
    assert len(log.schemas()) == 5


@examples(2)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_late_target_gets_its_changes_from_runs(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    root, random = tmp_path_factory.mktemp("cold"), Random(seed)
    sources = [source for source in histories(seed, 4) if any(row["key"] for row in source.log)]
    rows = interleaved(sources)
    every = transactions(rows)
    writer = log_writer(root)
    for start in range(0, len(every), 7):
        append(writer, every[start : start + 7])
        if random.random() < 0.5:
            compact(None, root)
    compact(None, root)
    trim(writer, root)

    position = Position(random.choice(rows)["position"])
    before = to_arrow([row for row in rows if row["position"] <= position])
    for source in sources:
        target = apply_changes(Target(), folded(before), source)
        assert apply_changes(target, folded(read_log(root, position)), source).table == source.table


def apply_changes(target: Target, changes: list[Row], source: Source) -> Target:
    target.apply([row for row in changes if row["relation"] == source.relation])
    return target


def test_partial_moves_are_completed_from_older_runs(tmp_path: Path) -> None:
    writer = log_writer(tmp_path)
    append(writer, [[key(5, 0, "c", "a", after={1: "a", 2: "x"}), key(5, 1, "c", "b", after={1: "b"})]])
    compact(None, tmp_path, everything=True)
    moved = key(6, 1, "u", "c", after={1: "c"}, partial=True, old_key=["a"])
    append(writer, [[key(6, 0, "d", "a"), moved, key(6, 2, "u", "b", after={1: "b", 2: "y"})]])

    for parts in (1, 3):
        compact(None, tmp_path, everything=True, limits=CompactionLimits(parts=parts))
    newest = sorted_rows(compacted_state(tmp_path).runs[-1].files).to_pylist(maps_as_pydicts="strict")
    assert [(row["key"], row["op"], row["after"], row["partial"]) for row in newest if row["position"] == 6] == [
        (["a"], "d", None, False),
        (["c"], "u", {1: "c", 2: "x"}, False),
        (["b"], "u", {1: "b", 2: "y"}, False),
    ]


def test_a_row_that_a_truncate_removed_is_no_base_row(tmp_path: Path) -> None:
    writer = log_writer(tmp_path)
    grown = [log_row(2, (5, n), "c", key=[str(n)], after={1: "x"}) for n in range(1, 2_000)]
    append(writer, [[key(5, 0, "c", "a", after={1: "a", 2: "x"}), *grown]])
    for later in (log_row(1, (6, 0), "t"), key(7, 0, "u", "b", after={1: "b"}, partial=True, old_key=["a"])):
        compact(None, tmp_path, everything=True)
        append(writer, [[later]])
    assert compact(None, tmp_path, everything=True).merged == 0

    (newest,) = sorted_rows(compacted_state(tmp_path).runs[-1].files).to_pylist(maps_as_pydicts="strict")
    assert (newest["key"], newest["after"], newest["partial"]) == (["b"], {1: "b"}, True)


def test_only_closed_segments_are_compacted_without_everything(tmp_path: Path) -> None:
    writer = log_writer(tmp_path)
    assert compact(None, tmp_path) == CompactionResult(horizon=START)
    for place in (5, 6, 7):
        append(writer, [[key(place, 0, "c", str(place), after={1: "x"})]])

    assert compact(None, tmp_path, upto=Position(5)).horizon == 5
    assert compact(None, tmp_path).horizon == 6
    again = compact(None, tmp_path)
    assert (again.horizon, again.rows_in) == (6, 0)
    last = compact(None, tmp_path, everything=True)
    assert (last.horizon, last.rows_in, last.rows_out) == (7, 1, 1)


def test_spark_starts_for_a_large_merge_and_not_for_many_new_rows(tmp_path: Path) -> None:
    asked, limits = list[int](), CompactionLimits(large=2)
    writer = log_writer(tmp_path)

    def start() -> None:
        asked.append(len(asked))

    append(writer, [[key(place, 0, "c", str(place), after={1: "x"}) for place in (5, 6, 7)]])
    compact(start, tmp_path, everything=True, limits=limits)
    assert asked == []
    append(writer, [[key(8, place, "c", f"8{place}", after={1: "x"}) for place in range(9)]])
    done = compact(start, tmp_path, everything=True, limits=limits)
    assert (done.merged, asked) == (2, [0])


def test_a_row_that_never_changes_does_not_block_retention(tmp_path: Path) -> None:
    writer = log_writer(tmp_path)
    append(writer, [[key(5, 0, "c", "idle", after={1: "idle"})]])
    for place in range(6, 12):
        append(writer, [[key(place, 0, "u", "busy", after={1: str(place)})]])
    compact(None, tmp_path)

    assert trim(writer, tmp_path) == 10
    assert [row["key"] for row in folded(read_log(tmp_path))] == [["idle"], ["busy"]]


def test_a_tombstone_is_removed_once_every_consumer_has_passed_it(tmp_path: Path) -> None:
    writer = log_writer(tmp_path, ONE_SEGMENT)
    append(writer, [[key(5, 0, "c", "a", after={1: "a"}), key(5, 1, "c", "b", after={1: "b"})]])
    compact(None, tmp_path, everything=True)
    append(writer, [[key(6, 0, "d", "a"), log_row(2, (6, 1), "d", before={1: "x"})]])
    append(writer, [[key(7, 0, "d", "b")]])

    def tombstones() -> list[int]:
        return [row["position"] for row in sorted_rows(compacted_state(tmp_path).files).to_pylist() if row["op"] == "d"]

    merged = compact(None, tmp_path, everything=True).merged
    assert (merged, tombstones(), compacted_state(tmp_path).floor) == (2, [6, 7, 6], 0)  # nobody is known
    consumers.register(tmp_path, Consumer("one", "lake", Position(9)))
    consumers.register(tmp_path, Consumer("two", "find", Position(6)))
    append(writer, [[key(8, n, "c", str(n), after={1: "much"}) for n in range(2_000)]])
    assert compact(None, tmp_path, everything=True).merged == 2
    assert (tombstones(), compacted_state(tmp_path).floor) == ([7, 6], 6)  # of a table without a key it is no tombstone


@pytest.mark.parametrize(
    ("compactions", "size"),
    [
        (10, QUICK),
        pytest.param(50, log_amplification.SMALL, marks=pytest.mark.slow),
        pytest.param(50, log_amplification.grown(log_amplification.SMALL), marks=pytest.mark.slow),
    ],
    ids=["few", "many", "of a log that only grows"],
)
def test_a_busy_log_writes_each_byte_at_most_five_times(
    tmp_path: Path, compactions: int, size: log_amplification.Size
) -> None:
    log = log_amplification.Log(tmp_path, replace(size, compactions=compactions), seed=compactions)
    log.live()

    assert log.amplification <= 5


def test_a_transaction_in_two_segments_is_compacted_as_a_whole(tmp_path: Path) -> None:
    writer = log_writer(tmp_path)
    schema = log_row(1, (6, 0), "s", payload=b"{}")
    append(writer, [[key(5, 0, "c", "a", after={1: "a"})]])
    append(writer, [[schema, key(6, 1, "c", "b", after={1: "b"})]])
    assert len({file.segment for file in LogReader(tmp_path).every_file()}) == 3

    assert compact(None, tmp_path).horizon == 5
    append(writer, [[key(7, 0, "c", "c", after={1: "c"})]])
    assert compact(None, tmp_path).horizon == 6


def test_a_range_without_remaining_rows_moves_the_horizon(tmp_path: Path) -> None:
    writer = log_writer(tmp_path)
    append(writer, [[message_row((5 * SPREAD, 0))]])

    outcome = compact(None, tmp_path, everything=True)
    assert (outcome.rows_in, outcome.rows_out, compacted_state(tmp_path).horizon) == (1, 0, 5 * SPREAD)
