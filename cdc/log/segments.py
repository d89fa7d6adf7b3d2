"""Segment: which partition of `changes` the next file goes to.

Segments roll by bytes or by time, so that retention can drop whole partitions without rewriting a file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLimits:
    """When a segment is full."""

    size: int
    """Bytes of data files."""
    age: float
    """Seconds since its first file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSegment:
    """The open segment; the clock is the caller's."""

    number: int
    size: int = 0
    opened_at: float
    """Seconds, on the caller's clock."""

    def rolled(self, limits: SegmentLimits, now: float) -> Self:
        """This segment, or the next one if this one is full; an empty one is never left."""
        if self.size and (self.size >= limits.size or now - self.opened_at >= limits.age):
            return replace(self, number=self.number + 1, size=0, opened_at=now)
        return self

    def grown(self, size: int) -> Self:
        """This segment with one more file of size bytes."""
        return replace(self, size=self.size + size)
