"""Holdings: what is told of a log's past and of its consumers; what looks it up takes a second to load.

Positions are text as Postgres prints an LSN, times ISO 8601 UTC; null where there is none or nobody knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cdc.position import Position
from cdc.service.problem import Problem


class LogState(StrEnum):
    """Whether there is a log to tell of."""

    #: It was read; problems say what of it could not be.
    READ = "read"
    #: Nothing is there, as before the first copy.
    ABSENT = "absent"
    #: Something is there, and it cannot be read, or not in time.
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLine:
    """One segment of single changes."""

    segment: int
    files: int
    rows: int
    bytes: int
    first: str
    last: str
    began_at: str | None
    """When its first transaction was committed."""
    ended_at: str | None
    """When its last one was, so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """One sorted run of the compacted log."""

    run: int
    files: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLine:
    """One data file of a segment or a run."""

    path: str
    rows: int
    bytes: int
    first: str
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """One transaction of the log, without the values of its rows."""

    position: str
    rows: int
    """All of them."""
    changes: list[dict[str, Any]]
    """The first of them as `cdc log inspect POSITION --json` has them, but for before, after, payload and unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """The latest compaction."""

    at: str
    rows: int
    """That it wrote."""
    changes: int | None = None
    """That it read; known of one that the running apply process made."""
    seconds: float | None = None
    """How long it took; known of the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLine:
    """One reader of the log that trimming waits for."""

    name: str
    uuid: str
    position: str
    pinned: int | None
    """Version of the compacted table that it is being filled from."""
    behind_bytes: int | None
    """Of WAL, to the end of the log; null across epochs."""
    behind_seconds: float | None
    """From the last change that it has to the last one of the log."""
    behind_segments: int
    """That it has not read to their end."""
    holds_bytes: int
    """Of compacted segments that stay for its sake."""
    seen_at: str
    seen_seconds: float
    """Ago."""
    state: str
    """running | silent (nothing was heard of it lately) | late (the log does not lead on from where it stands)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatus:
    """The log at one moment."""

    at: str
    state: LogState
    durable: str | None = None
    """The log's end."""
    segment_count: int = 0
    file_count: int = 0
    """Of single changes, as the rows."""
    row_count: int = 0
    oldest_segment: SegmentLine | None = None
    newest_segment: SegmentLine | None = None
    horizon: str | None = None
    """The compacted log holds the state here."""
    horizon_behind_bytes: int | None = None
    """Of WAL, from the horizon to the end of the log."""
    horizon_behind_seconds: float | None = None
    """The same in time, from change to change."""
    floor: str | None = None
    """Deletes up to here are forgotten: a sink that stands below is built anew."""
    oldest: str | None = None
    """Every change above is there by itself; null while all are."""
    runs: tuple[RunLine, ...] = ()
    compaction: Compaction | None = None
    changes_bytes: int = 0
    compacted_bytes: int = 0
    leaving_bytes: int | None = None
    """Of files that left the log and wait on the disk for who still reads them."""
    consumers: tuple[ConsumerLine, ...] = ()
    """By name."""
    problems: tuple[Problem, ...] = ()

    @property
    def slowest(self) -> ConsumerLine | None:
        """The consumer that is furthest behind."""
        return min(self.consumers, key=lambda line: Position.parse(line.position), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trimmable:
    """Segments that may go: compacted, and read by everybody or too old to wait."""

    segments: tuple[int, ...]
    oldest: str
    """Position up to which single changes go with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VacuumReport:
    """What was let go of, or would be in a dry run."""

    dry_run: bool
    trim: Trimmable | None
    """For the reader, which alone takes segments out: it was asked to, unless this is a dry run."""
    files: int
    """That had left the log, whose grace is over: removed."""
    bytes: int
    leaving_bytes: int
    """Of files that stay on the disk for who still reads them."""


def wal_between(after: Position, upto: Position) -> int | None:
    """Bytes of WAL from one position to a later one; None across epochs, which count their WAL anew."""
    return max(0, upto - after) if after.epoch == upto.epoch else None
