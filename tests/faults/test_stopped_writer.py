"""A writer stopped in the middle of its commit while another takes over and clears up is refused when it goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from cdc.delta_protocol.checkpoints import KEEP, last_checkpoint
from cdc.errors import LogFenced
from cdc.failpoint import VARIABLE
from cdc.log.disk_format import CHANGES, COMPACTED
from cdc.log.fenced_table import CHECKPOINT_EVERY
from cdc.log.reader import LogReader
from cdc.log.retrying_writer import RetryingWriter
from cdc.log.vacuum import remove_staged_files
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.faults.log_workload import CLOSED
from tests.fixtures import forked
from tests.fixtures.disk import small_file_system
from tests.fixtures.waiting import PATIENCE, until
from tests.log.rows import IDENTITY, info, row, table
from tests.log.simple_compaction import open_compactor, read_range

APPENDS = """
import sys
from cdc.log.writer import LogWriter
from tests.faults.log_workload import CLOSED
from tests.log.rows import info, row, table
writer = LogWriter(sys.argv[1], CLOSED)
writer.commit(writer.stage(table(row(1000))), info(1000))
"""
COMPACTS = """
import sys
from pipelines.compaction.compaction_steps import compact
compact(None, sys.argv[1])
"""
CHECKPOINTS = """
import sys
from cdc.log.fenced_table import CHECKPOINT_EVERY
from cdc.log.writer import LogWriter
from tests.faults.log_workload import CLOSED
from tests.log.rows import info
writer = LogWriter(sys.argv[1], CLOSED)
for position in range(1000, 1000 + 3 * CHECKPOINT_EVERY):
    writer.commit([], info(position))
"""
MANY = CHECKPOINT_EVERY + 3


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    """A log of three segments, the first of which is compacted."""
    root = tmp_path / "log"
    writer = LogWriter.open(root, IDENTITY, CLOSED)
    for position in (10, 20, 30):
        writer.commit(writer.stage(table(row(position, key=[str(position)]))), info(position))
    open_compactor(root).commit([], horizon=Position(0), floor=Position(0))
    return root


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB, where the log will be."""
    with small_file_system(tmp_path / "log") as place:
        yield place


@contextmanager
def stopped(root: Path, name: str, code: str) -> Iterator[list[str]]:
    """Code that is stopped before its next commit of a table, next to a block; yields what it prints afterwards."""
    with stopped_at(root, f"before_commit_of_{name}", code) as said:
        yield said


@contextmanager
def stopped_at(root: Path, point: str, code: str) -> Iterator[list[str]]:
    """Code that is stopped at a failpoint, next to a block; yields what it prints afterwards."""
    said = list[str]()
    stop = {VARIABLE: f"{point}:1:stop"}
    printed = root.parent / "printed"
    with printed.open("ab") as output:
        child = forked.start("tests.run_code", code, root, output=output, environment=stop)
    stat = Path(f"/proc/{child.pid}/stat")

    def is_stopped() -> bool:
        return stat.read_text().rpartition(")")[2].split()[0] == "T"

    try:
        until(lambda: child.poll() is not None or is_stopped(), stat.read_text)
        assert child.poll() is None, printed.read_text()
        yield said
        child.send_signal(signal.SIGCONT)
        child.wait(PATIENCE)
    finally:
        child.kill()
    said.append(printed.read_text())


def forget_commits(table: Path) -> None:
    """Remove the commits that a checkpoint holds, as clean-up does once they are old."""
    newest = max((table / "_delta_log").glob("*.checkpoint.parquet")).name.partition(".")[0]
    gone = [commit for commit in (table / "_delta_log").glob("*.json") if commit.stem < newest]
    for commit in gone:
        commit.unlink()
    assert gone


def rows(root: Path) -> list[int]:
    log = LogReader(root)
    return [row["position"] for row in read_range(log, Position(0), log.durable or Position(0))]


def test_a_reader_whose_staged_files_another_one_removed_does_not_commit_them(root: Path) -> None:
    with stopped(root, CHANGES, APPENDS) as said:
        assert remove_staged_files(root) > 0
    assert LogFenced.code in said[0] or LogFenced.__name__ in said[0]
    assert rows(root) == [10, 20, 30]


def test_a_compactor_whose_run_another_one_removed_does_not_commit_it(root: Path) -> None:
    with stopped(root, COMPACTED, COMPACTS) as said:
        open_compactor(root).new_run()
    assert LogFenced.__name__ in said[0]
    assert open_compactor(root).runs == ()


def test_a_reader_that_is_overtaken_by_many_commits_which_are_cleaned_away_is_refused(root: Path) -> None:
    with stopped(root, CHANGES, APPENDS) as said:
        fresh = LogWriter(root, CLOSED)
        for position in range(40, 40 + MANY):
            fresh.commit([], info(position))
        forget_commits(root / CHANGES)
    assert LogFenced.__name__ in said[0]
    assert rows(root) == [10, 20, 30]
    fresh.commit(fresh.stage(table(row(500))), info(500))
    assert rows(root) == [10, 20, 30, 500]


def test_a_reader_that_is_overtaken_inside_its_checkpoint_is_refused(root: Path) -> None:
    with stopped_at(root, "before_checkpoint_hint", CHECKPOINTS) as said:
        fresh = LogWriter(root, CLOSED)
        before = fresh.durable or Position(0)
        for position in range(2000, 2000 + KEEP + 2 * CHECKPOINT_EVERY):
            fresh.commit([], info(position))
        last, hint = LogReader(root).version, last_checkpoint(root / CHANGES)
    assert LogFenced.__name__ in said[0]
    assert before < 2000
    assert last_checkpoint(root / CHANGES) == hint
    assert (LogReader(root).version, LogReader(root).durable) == (last, fresh.durable)


@pytest.mark.slow
def test_a_compactor_that_is_overtaken_by_many_commits_which_are_cleaned_away_is_refused(root: Path) -> None:
    with stopped(root, COMPACTED, COMPACTS) as said:
        fresh = open_compactor(root)
        for _ in range(MANY):
            fresh.commit([], horizon=Position(0), floor=Position(0))
        forget_commits(root / COMPACTED)
    assert LogFenced.__name__ in said[0]
    assert open_compactor(root).runs == ()
    fresh.commit([], horizon=Position(0), floor=Position(0))


def test_a_reader_that_waited_for_room_while_another_one_cleared_up_commits_nothing(small: Path) -> None:
    LogWriter.open(small, IDENTITY, CLOSED)
    ballast = small / "ballast"

    def blocked(on: bool) -> None:
        if on:
            ballast.unlink()
            assert remove_staged_files(small) > 0

    writer = RetryingWriter(small, CLOSED, Event(), blocked)
    writer.commit(writer.stage(table(row(10))), info(10))
    files = writer.stage(table(row(20)))
    fill(ballast)
    with pytest.raises(LogFenced):
        writer.commit(files, info(20))
    assert rows(small) == [10]


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as sink:
        try:
            while True:
                sink.write(bytes(4096))
        except OSError:
            return
