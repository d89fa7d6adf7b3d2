"""The writer of runs: live rows of files, their division into parts and files, and errors of workers."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.errors import LogCorrupt
from cdc.log.reader import LogReader
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.compaction.compact_rows import compact_rows
from pipelines.compaction.compaction_steps import CompactionLimits, compact
from pipelines.compaction.run_writer import find_live_rows, read_live_rows, split_into_files
from tests.pipelines.cold_log import append, folded, histories, interleaved, log_writer, transactions
from tests.pipelines.compaction.test_compaction_steps import START, compacted_state, key, read_log, sorted_rows
from tests.pipelines.fold_model import log_row, to_arrow


def test_live_rows_are_the_latest_of_each_key_and_the_range_ends_between_two_files(tmp_path: Path) -> None:
    writer = log_writer(tmp_path)
    for position in (5, 6, 7):
        append(writer, [[key(position, n, "u", name, after={1: name}) for n, name in enumerate("ab")]])
    files = sorted(LogReader(tmp_path).every_file(), key=attrgetter("first"))

    live, end = find_live_rows(files, START, Position(7), 100)
    (rows,) = read_live_rows(files, live, START, Position(7))
    assert (rows["position"].to_pylist(), rows.schema, end) == ([7, 7], LOG_SCHEMA, 7)
    live, end = find_live_rows(files, START, Position(7), 1)
    assert (live["position"].to_pylist(), end) == ([5, 5], 5)


def test_a_run_has_the_same_rows_whatever_its_parts_and_workers(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = transactions(interleaved(histories(7, 12)))
    found = []
    for workers, parts in ((None, 1), (None, 4), (spark, 4)):
        root = tmp_path_factory.mktemp("cold")
        writer = log_writer(root)
        for start in range(0, len(rows), 40):
            append(writer, rows[start : start + 40])
            if start == len(rows) // 60 * 40:  # moves in the second run have base rows in the first
                compact(workers, root, limits=CompactionLimits(parts=parts))
        outcome = compact(workers, root, everything=True, limits=CompactionLimits(parts=parts))
        assert outcome.merged == 0
        # parts differ in their files, not in their rows
        found.append((sorted_rows(compacted_state(root).files), outcome.rows_in, outcome.rows_out))
        assert folded(read_log(root)) == folded(to_arrow([row for own in rows for row in own]))

    assert found[0] == found[1] == found[2]


def test_large_tables_and_schema_rows_have_their_own_files() -> None:
    small = [log_row(relation, (5, 0), "c", key=["1"], after={1: "1"}) for relation in (1, 3)]
    large = [log_row(2, (6, n), "c", key=[str(n)], after={1: str(n)}) for n in range(1_000)]
    schemas = [log_row(relation, (4, 0), "s", payload=b"{}") for relation in (1, 2, 3)]
    rows = compact_rows(to_arrow([*small, *large, *schemas]))

    columns = [own.select(["relation", "op"]).to_pydict() for own in split_into_files(rows, 1_000)]
    files = [Counter(zip(own["relation"], own["op"], strict=True)) for own in columns]
    assert files == [{(1, "s"): 1, (2, "s"): 1, (3, "s"): 1}, {(2, "c"): 1_000}, {(1, "c"): 1, (3, "c"): 1}]
    assert [own.num_rows for own in split_into_files(rows, 1)] == [3, 1_002]


@pytest.mark.parametrize("by", ["this process", pytest.param("workers", marks=pytest.mark.slow)])
def test_the_error_names_an_unreadable_file_and_no_run_is_committed(
    request: pytest.FixtureRequest, tmp_path: Path, by: str
) -> None:
    writer = log_writer(tmp_path)
    append(writer, [[key(5, 0, "c", "a", after={1: "a"})]])
    append(writer, [[key(6, 0, "c", "b", after={1: "b"})]])
    broken = Path(LogReader(tmp_path).every_file()[0].path)
    broken.write_bytes(broken.read_bytes()[:-10])

    workers = None if by == "this process" else request.getfixturevalue("spark")
    with pytest.raises(LogCorrupt, match=broken.name):
        compact(workers, tmp_path, everything=True, limits=CompactionLimits(parts=2))
    assert compacted_state(tmp_path).runs == ()
