"""Lost: a range of the log of which rows are gone for good, and where the log says of which tables that is; pure.

The data file of `changes` that says so, schema rows in the state NEEDS_RESYNC, has the range in its name. So the range
is known for just as long as who reads it can meet it: what trims the file has trimmed all that lies before.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Final, NamedTuple

from cdc.log.layout import LogFile
from cdc.position import Position

PREFIX: Final = "lost-"
"""How the name of such a file begins."""
_NAME: Final = re.compile(rf"{PREFIX}([0-9a-f]+)-([0-9a-f]+)-[0-9a-f]{{32}}\.parquet\Z")


class LostRange(NamedTuple):
    """Rows at some of the positions from the first to the last are gone."""

    first: Position
    last: Position
    recorded_at: Position
    """Where the log says so: who reads over the range is right again from here on, and not before."""

    def cuts(self, after: Position, upto: Position) -> bool:
        """Whether (after, upto] would lack rows without a word about it."""
        return after < min(self.last, upto) and self.first <= upto < self.recorded_at


def lost_range_file_name(first: Position, last: Position) -> str:
    """A name, like no other, for the file that tells of a range."""
    return f"{PREFIX}{int(first):x}-{int(last):x}-{uuid.uuid4().hex}.parquet"


def range_in_file_name(path: str) -> tuple[Position, Position] | None:
    """First and last position of the range that a file tells of; None for one that tells of none."""
    found = _NAME.match(path.rpartition("/")[2])
    return None if found is None else (Position(int(found[1], 16)), Position(int(found[2], 16)))


def lost_ranges_in(files: Iterable[LogFile]) -> list[LostRange]:
    """What files of `changes` tell, in order of the place where they do."""
    found = ((range_in_file_name(file.path), file.last) for file in files if file.schemas_only)
    return sorted(
        (LostRange(*ends, last) for ends, last in found if ends is not None), key=lambda lost: lost.recorded_at
    )


def end_after_lost_ranges(ranges: Iterable[LostRange], after: Position, upto: Position) -> Position:
    """Where a batch ends that was to end at upto: behind each range that it would be cut off in."""
    for lost in ranges:  # in order of their places: who tells of one may stand in the next
        if lost.cuts(after, upto):
            upto = lost.recorded_at
    return upto
