"""LogWriter: whole transactions, strictly onward, one writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.errors import LogCorrupt, LogFenced, LogFormatUnknown, LogUnwritable
from cdc.log.disk_format import FORMAT, LogIdentity
from cdc.log.fenced_table import CHECKPOINT_EVERY
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from tests.log.rows import IDENTITY, LIMITS, info, row, schema_of, table


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> LogWriter:
    return LogWriter.open(tmp_path, IDENTITY, LIMITS)


def everything(root: Path) -> list[tuple[int, int]]:
    reader = LogReader(root)
    return [
        (r["position"], r["ordinal"])
        for batch in reader.rows(Position(0), reader.durable or Position(0))
        for r in batch.to_pylist()
    ]


def test_a_new_log_has_no_durable_position(writer: LogWriter):
    assert writer.durable is None


def test_staged_rows_are_invisible_until_they_are_committed(writer: LogWriter, tmp_path: Path):
    writer.commit([], info(1))
    files = writer.stage(table(row(5)))
    assert everything(tmp_path) == []

    writer.commit(files, info(5))

    assert everything(tmp_path) == [(5, 0)]


def test_the_durable_position_survives_the_writer(writer: LogWriter, tmp_path: Path):
    writer.commit(writer.stage(table(row(5))), info(5))

    assert LogWriter.open(tmp_path, IDENTITY, LIMITS).durable == 5
    assert LogWriter.open(tmp_path, IDENTITY, LIMITS).last_commit == info(5)


@pytest.mark.parametrize("last", [5, 4])
def test_a_commit_that_does_not_advance_is_refused(writer: LogWriter, last: int):
    writer.commit([], info(5))
    with pytest.raises(LogFenced, match="would not advance"):
        writer.commit([], info(last))


@pytest.mark.parametrize("others", [1, CHECKPOINT_EVERY + 3])
def test_a_writer_that_another_one_overtook_is_fenced(tmp_path: Path, others: int):
    """Also when checkpoints and clean-up came in between."""
    stale = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    stale.commit([], info(1))
    fresh = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    for position in range(2, 2 + others):
        fresh.commit([], info(position))

    with pytest.raises(LogFenced):
        stale.commit(stale.stage(table(row(900))), info(900))

    assert everything(tmp_path) == []
    fresh.commit([], info(901))


def test_a_writer_is_fenced_when_the_commits_in_between_are_cleaned_away(tmp_path: Path):
    stale = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    stale.commit([], info(1))
    fresh = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    for position in range(2, CHECKPOINT_EVERY + 3):
        fresh.commit([], info(position))
    log = tmp_path / "changes" / "_delta_log"
    last = max(log.glob("*.checkpoint.parquet")).name.partition(".")[0]
    for commit in [file for file in log.glob("*.json") if file.stem < last]:
        commit.unlink()
    with pytest.raises(LogFenced):
        stale.commit([], info(900))


def test_of_two_writers_that_start_alike_the_second_fails(tmp_path: Path):
    first, second = (LogWriter.open(tmp_path, IDENTITY, LIMITS) for _ in range(2))
    first.commit(first.stage(table(row(3))), info(3))

    with pytest.raises(LogFenced):
        second.commit(second.stage(table(row(3))), info(3))

    assert everything(tmp_path) == [(3, 0)]


def test_a_truncated_file_is_not_committed(writer: LogWriter):
    files = writer.stage(table(row(5)))
    files[0].path.write_bytes(files[0].path.read_bytes()[:-10])
    with pytest.raises(LogCorrupt):
        writer.commit(files, info(5))


def test_a_missing_file_is_not_committed(writer: LogWriter):
    files = writer.stage(table(row(5)))
    files[0].path.unlink()
    with pytest.raises(LogCorrupt):
        writer.commit(files, info(5))


def test_files_are_sorted_by_relation_then_position(writer: LogWriter, tmp_path: Path):
    rows = table(row(5, 0, relation=9), row(5, 1, relation=7), row(6, 0, relation=9), row(6, 1, relation=7))
    writer.commit(writer.stage(rows), info(6))
    batch = next(LogReader(tmp_path).rows(Position(0), Position(6)))
    assert batch["relation"].to_pylist() == [7, 7, 9, 9]


def test_rows_that_came_in_many_small_pieces_are_sorted_the_same(writer: LogWriter, tmp_path: Path):
    pieces = [table(row(5, number, relation=9 - number % 2)) for number in range(50)]
    writer.commit(writer.stage(pa.concat_tables(pieces)), info(5))
    batch = next(LogReader(tmp_path).rows(Position(0), Position(5)))
    assert batch["relation"].to_pylist() == [8] * 25 + [9] * 25
    assert batch["ordinal"].to_pylist() == [*range(1, 50, 2), *range(0, 50, 2)]


def test_schema_rows_lie_in_a_file_of_their_own(writer: LogWriter, tmp_path: Path):
    payload = schema_of().to_json()
    writer.commit(writer.stage(table(row(5, 0, op="s", payload=payload), row(5, 1))), info(5))
    assert sorted(f.schemas_only for f in LogReader(tmp_path).every_file()) == [False, True]


def test_segments_roll_by_size(tmp_path: Path):
    writer = LogWriter.open(tmp_path, IDENTITY, SegmentLimits(size=1, age=3600.0))
    for position in (1, 2, 3):
        writer.commit(writer.stage(table(row(position))), info(position))
    assert sorted(f.segment for f in LogReader(tmp_path).every_file()) == [0, 1, 2]


OPENED = """
import os, sys
from pathlib import Path
from cdc.log.writer import LogWriter
from tests.log.rows import IDENTITY, LIMITS, info, row, table
root = Path(sys.argv[1])
writer = LogWriter.open(root, IDENTITY, LIMITS)
seen = []
sys.addaudithook(lambda name, args: seen.append(str(args[0])) if name in ("open", "os.mkdir") else None)
for position in (1, 2):
    writer.stage(table(row(position)))
folders = [path for path in seen if Path(path).is_dir()]
print(*(Path(path).relative_to(root) for path in folders))
"""


def test_a_new_segment_s_directory_is_synced_into_the_table_s_before_its_first_file(tmp_path: Path):
    """What is opened beside files is what is synced: a directory can be opened for nothing else."""
    found = subprocess.run([sys.executable, "-c", OPENED, str(tmp_path)], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["changes/segment=0", "changes", "changes/segment=0", "changes/segment=0"]


@pytest.mark.parametrize("description", ["", "{}", f'{{"format": {FORMAT + 1}, "system_id": "", "database": ""}}'])
def test_a_log_of_an_unknown_format_is_refused(description: str):
    with pytest.raises(LogFormatUnknown):
        LogIdentity.from_description(description)


def test_a_place_where_no_directory_can_be_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory", encoding="utf-8")
    with pytest.raises(
        LogUnwritable, match=r"the log's directory '.*/file/log/changes' cannot be created: not a directory"
    ):
        LogWriter.open(tmp_path / "file" / "log", IDENTITY, LIMITS)
