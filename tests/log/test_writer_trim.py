"""Trimming: whole segments leave `changes` in one commit, and nobody who reads on can tell."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from cdc.errors import LogCorrupt, LogFenced, LogTrimmed
from cdc.log.inspection import EVERY_ROW, newest_rows
from cdc.log.reader import LogReader
from cdc.log.retired_files import list_removals
from cdc.log.vacuum import remove_staged_files
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from tests.fixtures import forked
from tests.log.rows import IDENTITY, LIMITS, info, row, schema_of, table
from tests.log.simple_compaction import compact, latest_state, read_range

EVERY = SegmentLimits(size=1, age=3600.0)
"""A segment for each file."""
KILLED = """
import sys
from pathlib import Path
from cdc.log.writer import LogWriter
from cdc.log.writer import SegmentLimits
from cdc.position import Position
LogWriter(Path(sys.argv[1]), SegmentLimits(size=1, age=3600.0)).trim([0, 1], Position(20))
"""


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> LogWriter:
    """Of segments 0 to 5, with the schema in the first; a key is written, moved on, and deleted at 50."""
    writer = LogWriter.open(tmp_path, IDENTITY, EVERY)
    writer.commit(writer.stage(table(row(10, op="s", key=None, payload=schema_of().to_json()))), info(10))
    for position in (20, 30, 40):
        rows = table(row(position, 0, key=["a"]), row(position, 1, key=[str(position)]))
        writer.commit(writer.stage(rows), info(position))
    writer.commit(writer.stage(table(row(50, op="d", key=["20"], after=None))), info(50))
    writer.commit(writer.stage(table(row(60, key=["b"]))), info(60))
    return writer


def everything(root: Path) -> dict[Any, Any]:
    return latest_state(read_range(LogReader(root), Position(0), Position(60)))


def test_a_trim_keeps_what_the_log_says_of_itself(writer: LogWriter, tmp_path: Path):
    compact(tmp_path, 40)
    before = LogReader(tmp_path)
    writer.trim([0, 1, 2, 3], Position(40))
    after = LogReader(tmp_path)
    assert (after.durable, after.last_commit, after.schemas()) == (60, before.last_commit, before.schemas())
    assert after.schema_history() == before.schema_history()
    assert (after.oldest, before.oldest) == (40, 0)
    assert {file.segment for file in after.every_file()} == {4, 5}


def test_a_trimmed_log_folds_to_the_same_rows(writer: LogWriter, tmp_path: Path):
    expected = everything(tmp_path)
    compact(tmp_path, 30)
    compact(tmp_path, 50, merge=True, floor=20)
    for segments, upto in (([0, 1], 20), ([2, 3], 40), ([4], 50)):
        writer.trim(segments, Position(upto))
        assert everything(tmp_path) == expected
    assert (LogReader(tmp_path).oldest, len(LogReader(tmp_path).every_file())) == (50, 1)


def test_the_writer_goes_on_after_a_trim_and_so_does_the_next_one(writer: LogWriter, tmp_path: Path):
    compact(tmp_path, 40)
    writer.trim([0, 1, 2, 3], Position(40))
    writer.commit(writer.stage(table(row(70))), info(70))
    resumed = LogWriter(tmp_path, EVERY)
    assert (resumed.durable, resumed.last_commit) == (70, info(70))
    files = resumed.stage(table(row(80)))
    resumed.commit(files, info(80))
    assert files[0].segment == 7
    assert LogReader(tmp_path).oldest == 40


def test_a_writer_that_another_one_overtook_by_a_trim_is_fenced(writer: LogWriter, tmp_path: Path):
    compact(tmp_path, 40)
    other, third = LogWriter(tmp_path, EVERY), LogWriter(tmp_path, EVERY)
    other.trim([0], Position(10))
    with pytest.raises(LogFenced):
        writer.commit(writer.stage(table(row(70))), info(70))
    with pytest.raises(LogFenced):
        third.trim([0, 1], Position(20))
    assert LogReader(tmp_path).oldest == 10


def test_what_is_trimmed_already_may_be_asked_for_again(writer: LogWriter, tmp_path: Path):
    compact(tmp_path, 40)
    writer.trim([0, 1], Position(20))
    version = LogReader(tmp_path).version
    writer.trim([0, 1], Position(20))
    assert (LogReader(tmp_path).version, len(list_removals(tmp_path))) == (version, 1)


@pytest.mark.parametrize(
    ("horizon", "segments", "upto"), [(40, [0, 1], 15), (40, [5], 60), (15, [0, 1], 20), (None, [0], 10)]
)
def test_what_is_not_compacted_or_not_behind_the_position_is_not_trimmed(
    writer: LogWriter, tmp_path: Path, horizon: int | None, segments: list[int], upto: int
):
    if horizon is not None:
        compact(tmp_path, horizon)
    with pytest.raises(LogCorrupt, match="cannot be trimmed"):
        writer.trim(segments, Position(upto))
    assert len(LogReader(tmp_path).every_file()) == 6


@pytest.mark.parametrize(("point", "oldest"), [("trim_noted", 0), ("trim_committed", 20)])
def test_a_writer_that_is_killed_while_it_trims_leaves_the_log_before_or_after(
    writer: LogWriter, tmp_path: Path, point: str, oldest: int
):
    compact(tmp_path, 40)
    expected = everything(tmp_path)
    killed = forked.run("tests.run_code", KILLED, tmp_path, environment={"CDC_FAILPOINT": point})
    assert killed.status == -signal.SIGKILL, killed.errors
    assert (LogReader(tmp_path).oldest, everything(tmp_path)) == (oldest, expected)
    again = LogWriter(tmp_path, LIMITS)
    again.trim([0, 1], Position(20))
    again.commit([], info(70))
    assert (LogReader(tmp_path).oldest, everything(tmp_path)) == (20, expected)


def test_a_reader_that_opened_before_the_trim_goes_on_reading_its_files(writer: LogWriter, tmp_path: Path):
    reader = LogReader(tmp_path)
    files = reader.files(Position(0), Position(60))
    compact(tmp_path, 40)
    writer.trim([0, 1, 2, 3], Position(40))
    assert remove_staged_files(tmp_path) == 0
    assert reader.files(Position(0), Position(60)) == files
    assert sum(batch.num_rows for batch in reader.rows(Position(0), Position(60))) == 9


def test_a_view_keeps_its_compacted_version_until_it_is_refreshed(writer: LogWriter, tmp_path: Path):
    compact(tmp_path, 40)
    writer.trim([0, 1], Position(20))
    reader = LogReader(tmp_path)
    compact(tmp_path, 50, merge=True)
    assert reader.compacted is not None
    assert (reader.compacted.horizon, reader.latest_boundary(Position(0), 1)) == (40, 40)
    reader.refresh()
    assert (reader.compacted.horizon, reader.latest_boundary(Position(0), 1)) == (50, 50)


def test_a_refresh_that_finds_nothing_new_lists_no_file_again(writer: LogWriter, tmp_path: Path):
    compact(tmp_path, 40)
    writer.trim([0, 1], Position(20))
    reader = LogReader(tmp_path)
    files, held = reader.every_file(), reader.compacted
    reader._update_due = 0.0
    reader.refresh()
    assert reader.every_file() is files
    assert reader.compacted is held


def test_a_view_that_is_older_than_the_horizon_is_still_of_one_moment(writer: LogWriter, tmp_path: Path):
    """The writer and the compactor go on between two refreshes."""
    reader = LogReader(tmp_path)
    compact(tmp_path, 40)
    writer.trim([0, 1, 2], Position(30))
    writer.commit(writer.stage(table(row(70))), info(70))
    compact(tmp_path, 70)
    reader.refresh()
    assert reader.compacted is not None
    assert reader.durable is not None
    assert reader.oldest <= reader.compacted.horizon <= reader.durable


def test_ranges_of_changes_that_are_gone_are_refused_by_name(writer: LogWriter, tmp_path: Path):
    compact(tmp_path, 50, merge=True, floor=35)
    writer.trim([0, 1, 2, 3], Position(40))
    reader = LogReader(tmp_path)
    with pytest.raises(LogTrimmed, match=r"cannot be read up to 0/1E: single changes up to 0/28"):
        reader.files(Position(0), Position(30))
    with pytest.raises(LogTrimmed, match="cannot be read from 0/1E"):
        reader.latest_boundary(Position(30))
    assert [r["position"] for r in read_range(reader, Position(40), Position(60))] == [50, 60]
    assert len(read_range(reader, Position(35), Position(50))) == 3


def test_the_commit_time_at_the_horizon_is_known(writer: LogWriter, tmp_path: Path):
    compact(tmp_path, 50)
    writer.trim([0, 1, 2, 3, 4], Position(50))
    assert LogReader(tmp_path).committed_at(Position(50)) == 1_700_000_000_000_000


def test_people_are_shown_single_changes_alone(writer: LogWriter, tmp_path: Path):
    compact(tmp_path, 50)
    writer.trim([0, 1, 2, 3], Position(40))
    shown = newest_rows(LogReader(tmp_path), EVERY_ROW, 100)
    assert shown["position"].to_pylist() == [50, 60]


def test_a_trimmed_log_without_its_compacted_table_is_named(writer: LogWriter, tmp_path: Path):
    compact(tmp_path, 40)
    writer.trim([0], Position(10))
    (tmp_path / "compacted").rename(tmp_path / "elsewhere")
    with pytest.raises(LogCorrupt, match="'compacted' of the log does not contain their state"):
        LogReader(tmp_path)
