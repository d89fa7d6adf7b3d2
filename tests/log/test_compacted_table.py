"""CompactedWriter: runs come and go in whole commits, and one compactor at a time gets any of them in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.errors import LogCorrupt, LogFenced
from cdc.log.compacted_table import CompactedWriter, Run, WrittenFile, read_compacted_state
from cdc.log.disk_format import COMPACTED, LogIdentity
from cdc.log.fenced_table import CHECKPOINT_EVERY
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.log.rows import IDENTITY, LIMITS, info, row, table
from tests.log.simple_compaction import compact, latest_state, open_compactor, read_range, read_rows, write_run_files


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    """A log of four transactions that write two keys each."""
    writer = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    for position in (10, 20, 30, 40):
        writer.commit(writer.stage(table(row(position), row(position, 1))), info(position))
    return tmp_path


def rows_of(runs: tuple[Run, ...]) -> list[tuple[int, int]]:
    return [(r["position"], r["ordinal"]) for run in runs for file in run.files for r in read_rows(file)]


def run_of(writer: CompactedWriter, *positions: int) -> list[WrittenFile]:
    _, folder = writer.new_run()
    return write_run_files(folder, [row(position) for position in positions])


def test_a_log_that_was_never_compacted_has_no_state(root: Path):
    assert read_compacted_state(root) is None


def test_a_run_comes_with_its_horizon(root: Path):
    compact(root, 20)
    found = read_compacted_state(root)
    assert found is not None
    assert (found.horizon, found.floor, rows_of(found.runs)) == (20, 0, [(20, 0), (20, 1)])
    assert [(run.rows, run.relations) for run in found.runs] == [(2, (16384, 16384))]
    assert sum(file.size for file in found.files) == found.runs[0].size > 0


def test_a_merge_replaces_the_runs_and_moves_no_row(root: Path):
    compact(root, 40, writer=compact(root, 20))
    before = read_compacted_state(root)
    assert before is not None
    compact(root, 40, merge=True, floor=15)
    after = read_compacted_state(root)
    assert after is not None
    assert (len(before.runs), len(after.runs), after.horizon, after.floor) == (2, 1, 40, 15)
    kept = latest_state([r for file in before.files for r in read_rows(file)])
    assert latest_state([r for file in after.files for r in read_rows(file)]) == kept
    # who opened before the merge still reads
    assert rows_of(before.runs) == [(20, 0), (20, 1), (40, 0), (40, 1)]


def test_a_compactor_whose_files_another_one_has_taken_away_is_told_so(root: Path):
    first = open_compactor(root)
    _, folder = first.new_run()
    with pytest.raises(FileNotFoundError), first.alone():
        (Path(str(folder)) / "none.parquet").read_bytes()
    open_compactor(root).new_run()
    with pytest.raises(LogFenced) as caught, first.alone():
        write_run_files(folder, [row(10)])
    assert isinstance(caught.value.__context__, FileNotFoundError)


def test_a_compactor_goes_on_where_another_one_ended(root: Path):
    compact(root, 20)
    writer = open_compactor(root)
    assert (writer.horizon, len(writer.runs)) == (20, 1)
    compact(root, 30, writer=writer)
    assert (writer.horizon, len(writer.runs)) == (30, 2)


def test_the_horizon_moves_alone_where_there_is_nothing_to_keep(root: Path):
    writer = open_compactor(root)
    writer.commit([], horizon=Position(30), floor=Position(0))
    assert open_compactor(root).horizon == 30


@pytest.mark.parametrize("merges", [False, True])
def test_of_two_compactors_that_start_alike_the_second_fails(root: Path, merges: bool):
    compact(root, 20)
    first, second = open_compactor(root), open_compactor(root)
    compact(root, 20 if merges else 30, writer=first, merge=merges)
    with pytest.raises(LogFenced):
        compact(root, 20 if merges else 40, writer=second, merge=merges)
    found = read_compacted_state(root)
    assert found is not None
    assert found.runs == first.runs


def overtaken(root: Path, others: int) -> Iterator[CompactedWriter]:
    compact(root, 20)
    stopped, other = open_compactor(root), open_compactor(root)
    for _ in range(others):
        other.commit([], horizon=Position(20), floor=Position(0))
    yield stopped
    other.commit([], horizon=Position(30), floor=Position(0))


@pytest.mark.parametrize("others", [1, CHECKPOINT_EVERY + 3])
def test_a_stopped_compactor_that_goes_on_is_fenced_also_at_the_same_horizon(root: Path, others: int):
    """Also when checkpoints and clean-up came in between."""
    for stopped in overtaken(root, others):
        with pytest.raises(LogFenced):
            stopped.commit(run_of(stopped, 20), horizon=Position(20), floor=Position(0))


def test_a_stopped_compactor_is_fenced_when_the_commits_between_are_cleaned_away(root: Path):
    for stopped in overtaken(root, CHECKPOINT_EVERY + 3):
        commits = sorted((root / COMPACTED / "_delta_log").glob("*.json"))
        checkpoint = max((root / COMPACTED / "_delta_log").glob("*.checkpoint.parquet"))
        for commit in commits:
            if commit.stem < checkpoint.name.partition(".")[0]:
                commit.unlink()
        with pytest.raises(LogFenced):
            stopped.commit(run_of(stopped, 20), horizon=Position(20), floor=Position(0))


def test_a_run_that_is_not_there_any_more_is_not_replaced(root: Path):
    writer = compact(root, 20)
    with pytest.raises(LogFenced, match="cannot be replaced"):
        writer.commit([], horizon=Position(20), floor=Position(0), replaces=[7])


@pytest.mark.parametrize(("horizon", "floor"), [(19, 0), (20, 4), (20, 21)])
def test_horizon_and_floor_never_go_back_and_the_floor_stays_below(root: Path, horizon: int, floor: int):
    compact(root, 20, floor=5)
    with pytest.raises(LogFenced, match="neither may decrease"):
        open_compactor(root).commit([], horizon=Position(horizon), floor=Position(floor))


def test_a_file_that_is_not_as_it_was_written_is_not_committed(root: Path):
    writer = open_compactor(root)
    (file,) = run_of(writer, 10)
    for wrong in (replace(file, rows=3), replace(file, size=1), replace(file, name=f"{file.name}x")):
        with pytest.raises(LogCorrupt):
            writer.commit([wrong], horizon=Position(20), floor=Position(0))
    writer.commit([file], horizon=Position(20), floor=Position(0))


def test_rows_above_the_horizon_are_not_committed(root: Path):
    writer = open_compactor(root)
    with pytest.raises(LogCorrupt, match="at or below the horizon 0/14"):
        writer.commit(run_of(writer, 10, 21), horizon=Position(20), floor=Position(0))


def test_numbers_of_runs_are_never_used_again(root: Path):
    seen = [compact(root, 20 + n, merge=True).runs[0].number for n in range(3)]
    assert len(set(seen)) == 3
    assert seen == sorted(seen)


def test_what_a_killed_compactor_wrote_goes_and_what_is_read_stays(root: Path):
    compact(root, 20)
    compact(root, 20, merge=True)
    killed = open_compactor(root)
    (file,) = run_of(killed, 10)
    left = [path for path in (root / COMPACTED).glob("segment=*/*.parquet") if path.name not in file.name]
    open_compactor(root).new_run()
    assert not (root / COMPACTED / file.name).exists()
    assert [path for path in left if not path.exists()] == []


def test_commits_stay_few_on_the_disk(root: Path):
    writer = open_compactor(root)
    for _ in range(CHECKPOINT_EVERY + 1):
        writer.commit([], horizon=Position(20), floor=Position(0))
    assert list((root / COMPACTED / "_delta_log").glob("*.checkpoint.parquet"))
    assert open_compactor(root).horizon == 20


def test_compactors_that_live_for_one_commit_make_checkpoints_in_their_turn(root: Path):
    """A long-lived one that ends shortly before it would have made one leaves it to them."""
    before = open_compactor(root)
    for _ in range(CHECKPOINT_EVERY - 4):
        before.commit([], horizon=Position(20), floor=Position(0))
    assert not list((root / COMPACTED / "_delta_log").glob("*.checkpoint.parquet"))
    for _ in range(5):
        open_compactor(root).commit([], horizon=Position(20), floor=Position(0))
    assert len(list((root / COMPACTED / "_delta_log").glob("*.checkpoint.parquet"))) == 1


def test_the_table_of_another_log_is_refused(root: Path, tmp_path: Path):
    compact(root, 20)
    with pytest.raises(LogCorrupt, match="another log"):
        read_compacted_state(root, "other")
    log = LogReader(root)
    with pytest.raises(LogCorrupt, match="another log"):
        CompactedWriter.open(tmp_path, LogIdentity(system_id="1", database="x"), log.log_id)


def test_a_log_that_is_not_trimmed_is_read_from_changes_alone(root: Path):
    compact(root, 40)
    log = LogReader(root)
    assert (log.oldest, log.compacted) == (0, None)
    assert len(read_range(log, Position(0), Position(40))) == 8
