"""Records of lost ranges: positions whose rows were lost with a damaged file, and how the log records them; no I/O.

After a loss, `changes` gets a file of `s` rows that mark the affected tables as NEEDS_RESYNC. The name of this file
contains the first and the last lost position. A trim that removes this file removes all earlier changes as well. So the
record exists as long as a reader can read single changes of the range.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Final, NamedTuple

from cdc.log.disk_format import LogFile
from cdc.position import Position

PREFIX: Final = "lost-"
"""Prefix of the names of files that record a lost range."""
_NAME: Final = re.compile(rf"{PREFIX}([0-9a-f]+)-([0-9a-f]+)-[0-9a-f]{{32}}\.parquet\Z")


class LostRange(NamedTuple):
    """A range of positions in which rows are missing."""

    first: Position
    last: Position
    recorded_at: Position
    """Position of the `s` rows that record the loss; a read that includes lost positions must include these rows."""

    def cuts(self, after: Position, upto: Position) -> bool:
        """Return True if (after, upto] overlaps this lost range, and ends before the position that records the loss."""
        return after < min(self.last, upto) and self.first <= upto < self.recorded_at


def lost_range_file_name(first: Position, last: Position) -> str:
    """Return a unique name for the file that records the lost range from `first` to `last`."""
    return f"{PREFIX}{int(first):x}-{int(last):x}-{uuid.uuid4().hex}.parquet"


def range_in_file_name(path: str) -> tuple[Position, Position] | None:
    """Return the first and last lost position that a file's name contains; None for any other file name."""
    found = _NAME.match(path.rpartition("/")[2])
    return None if found is None else (Position(int(found[1], 16)), Position(int(found[2], 16)))


def lost_ranges_in(files: Iterable[LogFile]) -> list[LostRange]:
    """Return the lost ranges that these files of `changes` record, sorted by `recorded_at`."""
    found = ((range_in_file_name(file.path), file.last) for file in files if file.schemas_only)
    return sorted(
        (LostRange(*ends, last) for ends, last in found if ends is not None), key=lambda lost: lost.recorded_at
    )


def end_after_lost_ranges(ranges: Iterable[LostRange], after: Position, upto: Position) -> Position:
    """Return the end of a batch that starts after `after` and would end at `upto`.

    A batch that overlaps a lost range must not end before `recorded_at`, the position that records the loss. The result
    is then `recorded_at`, otherwise `upto`. `ranges` must be sorted by `recorded_at`.
    """
    for lost in ranges:  # ordered by record: the record of one range may be inside the next
        if lost.cuts(after, upto):
            upto = lost.recorded_at
    return upto
