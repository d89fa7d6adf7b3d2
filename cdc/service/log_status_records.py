"""Status of a log and of its consumers: plain records for commands, API and page.

Positions are text such as `16/B374D848`; times are ISO 8601 in UTC. A field is null if it has no value or if the value
is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cdc.position import Position
from cdc.service.problem import Problem


class LogState(StrEnum):
    """Whether the log could be read."""

    #: The log was read; `problems` names the parts that could not be read.
    READ = "read"
    #: There is no log; the reader creates the log with the first copy.
    ABSENT = "absent"
    #: The log cannot be read, or its storage does not answer in time.
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLine:
    """One segment of the log: a partition of the table `changes`."""

    segment: int
    files: int
    rows: int
    bytes: int
    first: str
    last: str
    began_at: str | None
    """Commit time of the segment's first transaction."""
    ended_at: str | None
    """Commit time of the segment's last transaction so far."""


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
    """Number of all rows of the transaction."""
    changes: list[dict[str, Any]]
    """First rows of the transaction, as `cdc log inspect POSITION --json` prints them, without the keys `before`,
    `after`, `payload` and `unchanged`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """The last compaction of the log."""

    at: str
    rows: int
    """Number of rows that the compaction wrote."""
    changes: int | None = None
    """Number of changes that the compaction read; known only if the running apply process compacted the log."""
    seconds: float | None = None
    """Duration of the compaction; known only if the running apply process compacted the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLine:
    """One consumer of the log, registered with its position."""

    name: str
    uuid: str
    position: str
    pinned: int | None
    """Version of the table `compacted` that the consumer reads; null while the consumer reads only `changes`."""
    behind_bytes: int | None
    """Bytes of WAL from the consumer's position to the end of the log; null if their epochs differ."""
    behind_seconds: float | None
    """Seconds from the commit of the consumer's last change to the commit of the last change in the log."""
    behind_segments: int
    """Number of segments that the consumer has not read completely."""
    holds_bytes: int
    """Bytes of compacted segments that are retained because the consumer has not read them yet."""
    seen_at: str
    """Time of the consumer's last report."""
    seen_seconds: float
    """Seconds since the consumer's last report."""
    state: str
    """running | silent (no recent report) | late (changes after the consumer's position are trimmed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatus:
    """Size, segments and consumers of the log at one time."""

    at: str
    state: LogState
    durable: str | None = None
    """Durable position: the end of the log."""
    timeline: int | None = None
    """Timeline of the source at the end of the log; each promotion increases it."""
    switch_point: str | None = None
    """LSN at which this timeline began; null for the first timeline, or if unknown."""
    segment_count: int = 0
    file_count: int = 0
    """Number of data files of the table `changes`; `row_count` is the number of rows in them."""
    row_count: int = 0
    oldest_segment: SegmentLine | None = None
    newest_segment: SegmentLine | None = None
    horizon: str | None = None
    """Position up to which the log is compacted."""
    horizon_behind_bytes: int | None = None
    """Bytes of WAL from the horizon to the end of the log."""
    horizon_behind_seconds: float | None = None
    """Seconds from the commit at the horizon to the last commit in the log."""
    floor: str | None = None
    """Position up to which tombstones are removed; a sink below both `floor` and `oldest` must be rebuilt."""
    oldest: str | None = None
    """Position up to which single changes are trimmed; null if no changes are trimmed."""
    runs: tuple[RunLine, ...] = ()
    compaction: Compaction | None = None
    changes_bytes: int = 0
    compacted_bytes: int = 0
    leaving_bytes: int | None = None
    """Bytes of removed files that are still on disk for readers of older table versions."""
    consumers: tuple[ConsumerLine, ...] = ()
    """Registered consumers, sorted by name."""
    problems: tuple[Problem, ...] = ()

    @property
    def slowest(self) -> ConsumerLine | None:
        """Return the consumer that is furthest behind; None without consumers."""
        return min(self.consumers, key=lambda line: Position.parse(line.position), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trimmable:
    """Segments that the retention rules allow the reader to trim.

    Each segment is compacted, and is either read by every consumer or older than the maximum age.
    """

    segments: tuple[int, ...]
    oldest: str
    """Position up to which the changes are gone when the reader has trimmed these segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VacuumReport:
    """Result of a vacuum of the log; after a dry run, the files that a vacuum would delete now."""

    dry_run: bool
    trim: Trimmable | None
    """Segments that the reader may trim; unless this was a dry run, the vacuum asked the reader to trim them."""
    files: int
    """Number of deleted files: orphan files, and removed files after their grace period."""
    bytes: int
    leaving_bytes: int
    """Bytes of removed files that are still on disk for readers of older table versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingLine:
    """One problem that a check found in the log."""

    damage: str
    """Kind of the problem: missing | size | unreadable | contents | order | duplicate | hole | range | version |
    commit | misfit | source | foreign | lost | unchecked. `DamageKind` explains each kind."""
    harmless: bool
    """Whether reads of the log return correct rows in spite of the problem."""
    file: str | None
    """Path of the file in the log; None if the problem concerns more than one file."""
    message: str
    first: str | None
    """First of the positions that the problem concerns; None if the problem concerns no position."""
    last: str | None
    """Last of the positions that the problem concerns."""
    tables: list[str]
    remedy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCheck:
    """Result of a check of the log's files: the range that was checked, and the findings."""

    sound: bool
    """True if no finding can make a read of the log return wrong rows."""
    complete: bool
    """True if the rows of every file were read, not only those of the newest files."""
    summary: str
    files: int
    read: int
    rows: int
    bytes: int
    durable: str | None
    horizon: str | None
    findings: list[FindingLine]


def wal_between(after: Position, upto: Position) -> int | None:
    """Return the number of bytes of WAL from `after` to `upto`; None if their epochs differ."""
    return max(0, upto - after) if after.epoch == upto.epoch else None
