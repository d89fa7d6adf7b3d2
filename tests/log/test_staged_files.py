"""Leftovers: what was staged and never committed goes, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cdc.bucket_files import Root
from cdc.log import retired_files
from cdc.log.disk_format import CHANGES, CommitInfo
from cdc.log.reader import LogReader
from cdc.log.vacuum import remove_staged_files
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.log.rows import IDENTITY, LIMITS, row, table

MINUTE = 60.0
"""Seconds: by less a file need not be younger or older, for the clock of a file system may be coarse."""


def dated(file: Root, seconds: float) -> None:
    """Let a file look as if it had been written so many seconds from now."""
    os.utime(str(file), (time.time() + seconds,) * 2)


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> LogWriter:
    """Of a log with one commit."""
    writer = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    commit(writer, 100)
    return writer


def commit(writer: LogWriter, position: int) -> Root:
    """One transaction; gives its file."""
    files = writer.stage(table(row(position)))
    writer.commit(files, CommitInfo(last=Position(position), committed_at=1, timeline=1))
    return files[0].path


def test_a_staged_file_that_was_never_committed_is_removed(writer: LogWriter, tmp_path: Path) -> None:
    (staged,) = writer.stage(table(row(200), row(200, 1)))
    dated(staged.path, -MINUTE)
    assert remove_staged_files(tmp_path) == staged.size
    assert not staged.path.exists()
    assert remove_staged_files(tmp_path) == 0


def test_what_the_log_holds_stays_however_young_it_looks(writer: LogWriter, tmp_path: Path) -> None:
    file = commit(writer, 200)
    dated(file, MINUTE)
    assert remove_staged_files(tmp_path) == 0
    assert sum(batch.num_rows for batch in LogReader(tmp_path).rows(Position(0), Position(200))) == 2


@pytest.mark.usefixtures("writer")
def test_a_file_that_the_log_has_let_go_stays_for_who_still_reads_it(tmp_path: Path) -> None:
    file = next((tmp_path / "changes").glob("segment=*/*.parquet"))
    let_go = file.with_name("let-go.parquet")
    let_go.write_bytes(file.read_bytes())
    dated(let_go, MINUTE)  # the clock went back since
    retired_files.record_removal(tmp_path, CHANGES, {f"{let_go.parent.name}/{let_go.name}": 1}, 2)
    assert remove_staged_files(tmp_path) == 0
    assert let_go.exists()


@pytest.mark.usefixtures("writer")
def test_a_file_that_goes_while_it_is_looked_at_is_no_error(tmp_path: Path) -> None:
    """As when it was trimmed, and is swept by another process; a link that leads nowhere is listed and not there."""
    file = next((tmp_path / "changes").glob("segment=*/*.parquet"))
    file.with_name("swept.parquet").symlink_to("nowhere")
    assert remove_staged_files(tmp_path) == 0
