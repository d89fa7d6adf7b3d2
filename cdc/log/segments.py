"""Segments of `changes`: partitions that roll over by size or age.

Retention can therefore drop whole partitions without rewriting a file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLimits:
    """Size and age at which a segment is full."""

    size: int
    """Bytes of data files."""
    age: float
    """Seconds since its first file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSegment:
    """The segment to which new files are added."""

    number: int
    size: int = 0
    opened_at: float
    """Seconds on the clock of the caller."""

    def rolled(self, limits: SegmentLimits, now: float) -> Self:
        """This segment, or a new one if this one is full; an empty segment is never full."""
        if self.size and (self.size >= limits.size or now - self.opened_at >= limits.age):
            return replace(self, number=self.number + 1, size=0, opened_at=now)
        return self

    def grown(self, size: int) -> Self:
        """This segment after adding a file of size bytes."""
        return replace(self, size=self.size + size)
