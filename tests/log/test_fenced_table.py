"""A commit that lost its bytes with the power was never confirmed: the log opens without it, and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable, TableFeatures

from cdc.delta_protocol.commits import commit_file
from cdc.errors import LogFormatUnknown
from cdc.log.compacted_table import read_compacted_state
from cdc.log.disk_format import CHANGES, COMPACTED
from cdc.log.fenced_table import FencedTable
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.faults.log_workload import CLOSED
from tests.log.rows import IDENTITY, info, row, table
from tests.log.simple_compaction import compact, read_range

KEPT = {"empty": (0, 0), "half": (1, 0), "zeros": (0, 2)}
"""How many halves of the bytes are left, and how many are zeros."""


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    """A log of three segments, the first of which is compacted and trimmed."""
    writer = LogWriter.open(tmp_path, IDENTITY, CLOSED)
    for position in (10, 20, 30):
        append(writer, position)
    compact(tmp_path, 10)
    writer.trim([0], Position(10))
    return tmp_path


def append(writer: LogWriter, position: int) -> None:
    writer.commit(writer.stage(table(row(position, key=[str(position)]))), info(position))


def positions(log: LogReader) -> list[int]:
    return sorted(row["position"] for row in read_range(log, Position(0), log.durable or Position(0)))


@pytest.mark.parametrize("torn", KEPT)
@pytest.mark.parametrize("name", [CHANGES, COMPACTED])
def test_a_torn_commit_changes_nothing_and_is_said_again(root: Path, name: str, torn: str) -> None:
    append(LogWriter(root, CLOSED), 40)
    compact(root, 20)
    held = {CHANGES: LogReader(root).version, COMPACTED: read_compacted_state(root).version}  # type: ignore[union-attr]
    commit = commit_file(root / name, held[name])
    half = len(commit.read_bytes()) // 2
    kept, zeros = KEPT[torn]
    commit.write_bytes(commit.read_bytes()[: kept * half] + bytes(zeros * half))
    writer = LogWriter.open(root, IDENTITY, CLOSED)
    left = [10, 20, 30] if name == CHANGES else [10, 20, 30, 40]
    assert positions(LogReader(root)) == left
    assert writer.last_commit is not None
    assert writer.last_commit.last == left[-1]
    append(writer, 50)
    compact(root, 30)
    assert positions(LogReader(root)) == [*left, 50]


def test_who_has_read_a_commit_as_empty_sees_what_takes_its_place(root: Path) -> None:
    append(LogWriter(root, CLOSED), 40)
    commit_file(root / CHANGES, LogReader(root).version).write_bytes(b"")
    reader = LogReader(root)
    writer = LogWriter.open(root, IDENTITY, CLOSED)
    append(writer, 40)
    append(writer, 50)
    reader.refresh()
    assert positions(reader) == [10, 20, 30, 40, 50]


def test_a_table_whose_creation_is_torn_is_made_anew(tmp_path: Path) -> None:
    LogWriter.open(tmp_path, IDENTITY, CLOSED)
    commit_file(tmp_path / CHANGES, 0).write_bytes(b"")
    append(LogWriter.open(tmp_path, IDENTITY, CLOSED), 10)
    assert positions(LogReader(tmp_path)) == [10]


def test_a_whole_commit_is_left_as_it_is(root: Path) -> None:
    commit = commit_file(root / CHANGES, LogReader(root).version)
    said = commit.read_bytes()
    LogWriter.open(root, IDENTITY, CLOSED)
    assert commit.read_bytes() == said


@pytest.mark.parametrize("name", [CHANGES, COMPACTED])
def test_a_table_whose_writers_another_client_gave_new_rules_is_not_written(root: Path, name: str) -> None:
    DeltaTable(str(root / name)).alter.add_feature(TableFeatures.ChangeDataFeed, allow_protocol_versions_increase=True)

    with pytest.raises(LogFormatUnknown, match=f"another client changed table '{name}' of the log: .* version 7"):
        FencedTable(root / name)
