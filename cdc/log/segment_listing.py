"""Listing of a log's segments with sizes and times, for displays."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.reader import LogReader
from cdc.position import Position

_SEGMENT: Final = "partition.segment"
_BEGAN: Final = "min.committed_at"
_ENDED: Final = "max.committed_at"
_FIRST: Final = "min.position"
_LAST: Final = "max.position"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSummary:
    """One segment of `changes`."""

    segment: int
    files: int
    rows: int
    size: int
    """Bytes."""
    first: Position
    last: Position
    began_at: datetime | None
    """Of its first transaction, cut to milliseconds; None if its files do not say."""
    ended_at: datetime | None
    """Of its last one so far."""


class SegmentListing:
    """A log's segments at one moment, from one listing."""

    def __init__(self, log: LogReader) -> None:
        self._files = log.listing()

    def segments(self) -> list[SegmentSummary]:
        """Oldest first."""
        if not self._files.num_rows:
            return []
        bounds = [(_FIRST, "min"), (_LAST, "max"), (_BEGAN, "min"), (_ENDED, "max")]
        sums = [("num_records", "sum"), ("size_bytes", "sum"), ([], "count_all")]
        rows = self._files.group_by(_SEGMENT).aggregate([*bounds, *sums]).to_pylist()
        found = [
            SegmentSummary(
                segment=int(row[_SEGMENT]),
                files=row["count_all"],
                rows=row["num_records_sum"],
                size=row["size_bytes_sum"],
                first=Position(row[f"{_FIRST}_min"]),
                last=Position(row[f"{_LAST}_max"]),
                began_at=row[f"{_BEGAN}_min"],
                ended_at=row[f"{_ENDED}_max"],
            )
            for row in rows
        ]
        return sorted(found, key=lambda extent: extent.segment)

    def seconds_behind(self, position: Position) -> float | None:
        """Between the last change and the last one at or below a position; from the first on, if none is.

        None if the log holds no changes, or does not say when they were committed.
        """
        if not self._files.num_rows:
            return None
        passed = self._files.filter(pc.less_equal(self._files[_LAST], int(position)))
        newest = _bound(self._files, _ENDED, "max")
        reached = _bound(passed, _ENDED, "max") if passed.num_rows else _bound(self._files, _BEGAN, "min")
        if newest is None or reached is None:
            return None
        return float((newest - reached).total_seconds())


def _bound(files: pa.Table, column: str, which: str) -> datetime | None:
    found: datetime | None = pc.min_max(files[column])[which].as_py()
    return found
