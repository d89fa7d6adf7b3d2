"""Trimming where storage takes no more: it waits as commits do, and what others still read stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from cdc.log.reader import LogReader
from cdc.log.retrying_writer import RetryingWriter
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from tests.fixtures.disk import small_file_system
from tests.log.rows import IDENTITY, info, row, table
from tests.log.simple_compaction import compact, read_range

EVERY = SegmentLimits(size=1, age=3600.0)


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Iterator[Path]:
    """A compacted log of three segments on a file system of 8 MB."""
    with small_file_system(tmp_path / "log") as place:
        writer = LogWriter.open(place, IDENTITY, EVERY)
        for position in (10, 20, 30):
            writer.commit(writer.stage(table(row(position))), info(position))
        compact(place, 20)
        yield place


class Filled:
    """A writer on storage that is full until it is told so."""

    def __init__(self, root: Path) -> None:
        self.told: list[bool] = []
        self.ballast = root / "ballast"
        self.writer = RetryingWriter(root, EVERY, Event(), self.blocked)

    def fill(self) -> None:
        with self.ballast.open("wb", buffering=0) as sink:
            try:
                while True:
                    sink.write(bytes(4096))
            except OSError:
                return

    def blocked(self, on: bool) -> None:
        self.told.append(on)
        if on:
            self.ballast.unlink()


def test_a_trim_waits_for_room_and_is_made_once(root: Path):
    filled = Filled(root)
    filled.fill()
    filled.writer.trim([0, 1], Position(20))
    assert filled.told == [True, False]
    assert (LogReader(root).oldest, filled.writer.durable) == (20, 30)
    filled.writer.commit(filled.writer.stage(table(row(40))), info(40))
    assert [r["position"] for r in read_range(LogReader(root), Position(0), Position(40))] == [20, 30, 40]


def test_who_opened_before_a_trim_reads_on_although_storage_was_full_in_between(root: Path):
    before, filled = LogReader(root), Filled(root)
    filled.writer.trim([0, 1], Position(20))
    filled.fill()
    filled.writer.commit([], info(40))
    assert filled.told == [True, False]
    assert [r["position"] for r in read_range(before, Position(0), Position(30))] == [10, 20, 30]
