"""Lost ranges: position ranges whose rows were lost with a damaged file, and where the log records them; no I/O.

A data file of `changes` with schema rows in the state NEEDS_RESYNC records the range in its file name. The record
exists as long as a reader can reach the range: trimming removes it only after everything before it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Final, NamedTuple

from cdc.log.layout import LogFile
from cdc.position import Position

PREFIX: Final = "lost-"
"""Prefix of the names of such files."""
_NAME: Final = re.compile(rf"{PREFIX}([0-9a-f]+)-([0-9a-f]+)-[0-9a-f]{{32}}\.parquet\Z")


class LostRange(NamedTuple):
    """A range in which rows are missing."""

    first: Position
    last: Position
    recorded_at: Position
    """Position of the schema rows that record the loss; a read that includes them is correct."""

    def cuts(self, after: Position, upto: Position) -> bool:
        """Whether (after, upto] would miss rows without containing the record of the loss."""
        return after < min(self.last, upto) and self.first <= upto < self.recorded_at


def lost_range_file_name(first: Position, last: Position) -> str:
    """A unique name for the file that records a range."""
    return f"{PREFIX}{int(first):x}-{int(last):x}-{uuid.uuid4().hex}.parquet"


def range_in_file_name(path: str) -> tuple[Position, Position] | None:
    """First and last position of the range in a file's name; None for other files."""
    found = _NAME.match(path.rpartition("/")[2])
    return None if found is None else (Position(int(found[1], 16)), Position(int(found[2], 16)))


def lost_ranges_in(files: Iterable[LogFile]) -> list[LostRange]:
    """The lost ranges that files of `changes` record, ordered by the position of the record."""
    found = ((range_in_file_name(file.path), file.last) for file in files if file.schemas_only)
    return sorted(
        (LostRange(*ends, last) for ends, last in found if ends is not None), key=lambda lost: lost.recorded_at
    )


def end_after_lost_ranges(ranges: Iterable[LostRange], after: Position, upto: Position) -> Position:
    """The end of a batch, moved from upto past each lost range that it would otherwise split."""
    for lost in ranges:  # ordered by record: the record of one range may be inside the next
        if lost.cuts(after, upto):
            upto = lost.recorded_at
    return upto
