"""Checkpoints: a writer makes them in time, and they replace the commits before them."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc.delta_protocol.checkpoints import HINT, checkpoint, checkpoint_at, version_of
from cdc.log.fenced_table import CHECKPOINT_EVERY
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.log.rows import IDENTITY, LIMITS, info, row, table


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> LogWriter:
    return LogWriter.open(tmp_path, IDENTITY, LIMITS)


def test_checkpoints_keep_the_commit_files_few(writer: LogWriter, tmp_path: Path):
    for position in range(1, CHECKPOINT_EVERY * 2 + 2):
        writer.commit([], info(position))
    assert list((tmp_path / "changes" / "_delta_log").glob("*.checkpoint.parquet"))
    assert LogReader(tmp_path).durable == CHECKPOINT_EVERY * 2 + 1


def test_commits_that_a_checkpoint_makes_superfluous_go_however_young_they_are(writer: LogWriter, tmp_path: Path):
    view, path = LogReader(tmp_path), tmp_path / "changes"
    for position in range(1, 20):
        writer.commit(writer.stage(table(row(position))), info(position))
    checkpoint(path, DeltaTable(str(path)).version(), keep=5)
    commits = sorted(int(file.stem) for file in (path / "_delta_log").glob("*.json"))
    assert commits == list(range(commits[-1] - 5, commits[-1] + 1))
    writer.commit(writer.stage(table(row(20))), info(20))
    view._update_due = 0.0
    view.refresh()
    assert (view.durable, sum(b.num_rows for b in LogReader(tmp_path).rows(Position(0), Position(20)))) == (20, 20)
    assert view.every_file() == LogReader(tmp_path).every_file()


def test_of_writers_that_live_for_one_commit_one_makes_the_checkpoint(tmp_path: Path):
    for position in range(1, CHECKPOINT_EVERY + 2):
        LogWriter.open(tmp_path, IDENTITY, LIMITS).commit([], info(position))
    assert len(list((tmp_path / "changes" / "_delta_log").glob("*.checkpoint.parquet"))) == 1


def test_the_hint_of_a_checkpoint_names_its_version(writer: LogWriter, tmp_path: Path):
    for position in (1, 2, 3):
        writer.commit([], info(position))
    path = tmp_path / "changes"
    (path / "_delta_log" / HINT).write_bytes(checkpoint_at(path, 2))
    (file,) = (path / "_delta_log").glob("*.checkpoint*.parquet")
    assert version_of(file) == 2
    assert DeltaTable(str(path)).version() == 3
