"""Stores of the state that processes report: of each process, each sink and each table, and the dead letters of sinks.

Page, API and commands show the reports. The authoritative positions are in the log and in the sinks. Each sink stores
its own dead letters, and the catalog contains a copy of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import delete, select

from cdc.catalog.connection import Database, upsert
from cdc.catalog.models import DeadLetterRow, ProcessRow, SinkRow, TableRow

AWAITS_SPARK: Final = "waits for Spark"
"""Reason that a sink reports while it waits for Spark to begin a batch, and so applies nothing.

The cause may follow it.
"""
NO_CORE: Final = "the cluster has given no core for 30 s"
"""Part of the reason of a sink whose backlog is for the executors of a cluster that gives none."""
REFUSED: Final = "refused"
"""State of a source table that matches a rule but cannot be captured; the table's reason says why."""
REPORT_MAX_AGE: Final = 5.0
"""Age in seconds above which a report counts as stale; processes report at least every three seconds."""
RECORD_ALL_EVERY: Final = 5.0
"""Seconds between two writes of all sinks and tables of a process, because the catalog may be a new one."""


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The status report of one process."""

    pipeline: str
    process: str
    """`reader`, `apply` or `server`."""
    pid: int
    state: str
    error: dict[str, Any] | None = None
    """Code, message and suggestion of the present error; None if the process has no error."""
    figures: list[Any] = field(default_factory=list)
    """Metrics of the process: [[name, [label…], value]…]."""
    reported_at: datetime | None = None
    """Time at which the report was stored; the store sets this field."""

    def age(self, now: datetime) -> float:
        """Return the seconds since the report, infinite if it was never stored. A time without zone is in UTC."""
        at = self.reported_at
        if at is None:
            return math.inf
        return max(0.0, (now - (at.replace(tzinfo=UTC) if at.tzinfo is None else at)).total_seconds())


class Processes:
    """The store of process reports, which contains the last report of each process."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def report(self, report: ProcessReport) -> None:
        """Store the report with the present time; it replaces the previous report of the process."""
        row = {
            "pipeline": report.pipeline,
            "process": report.process,
            "pid": report.pid,
            "state": report.state,
            "error": report.error,
            "figures": report.figures,
            "reported_at": datetime.now(UTC),
        }
        with self._database.writing() as session:
            upsert(session, ProcessRow, [row])

    def figures(self, pipeline: str, process: str) -> list[Any]:
        """Return the figures of the last report of a process; none before its first report."""
        query = select(ProcessRow.figures).where(ProcessRow.pipeline == pipeline, ProcessRow.process == process)
        with self._database.reading() as session:
            return list(session.execute(query).scalar() or ())

    def ls(self, pipeline: str) -> list[ProcessReport]:
        """Return the last report of each process of the pipeline, sorted by process name."""
        query = select(ProcessRow).where(ProcessRow.pipeline == pipeline).order_by(ProcessRow.process)
        with self._database.reading() as session:
            return [
                ProcessReport(r.pipeline, r.process, r.pid, r.state, r.error, r.figures, r.reported_at)
                for r in session.scalars(query)
            ]


@dataclass(frozen=True, slots=True)
class SinkProgress:
    """The progress of one sink, as the apply process last reported it."""

    sink: str
    position: int
    committed_at: datetime | None
    """Commit time of the transaction at the sink's position."""
    lag_seconds: float
    state: str
    reason: str | None = None
    recorded_at: datetime | None = None
    """Time at which the report was stored; the store sets this field."""

    @property
    def identity(self) -> tuple[str, str]:
        """The sink that this progress is about; a sink has no topic."""
        return self.sink, ""

    @property
    def content(self) -> object:
        """What a report writes at once if it changed: everything."""
        return self


class Sinks:
    """The store of sink progress, which contains the last report on each sink."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, pipeline: str, progress: SinkProgress) -> None:
        """Store the progress with the present time; it replaces the previous progress of the sink."""
        row = {
            "pipeline": pipeline,
            "sink": progress.sink,
            "position": int(progress.position),
            "committed_at": progress.committed_at,
            "lag_seconds": progress.lag_seconds,
            "state": progress.state,
            "reason": progress.reason,
            "recorded_at": datetime.now(UTC),
        }
        with self._database.writing() as session:
            upsert(session, SinkRow, [row])

    def ls(self, pipeline: str) -> list[SinkProgress]:
        """Return the last progress of each sink of the pipeline, sorted by name."""
        query = select(SinkRow).where(SinkRow.pipeline == pipeline).order_by(SinkRow.sink)
        with self._database.reading() as session:
            return [
                SinkProgress(r.sink, r.position, r.committed_at, r.lag_seconds, r.state, r.reason, r.recorded_at)
                for r in session.scalars(query)
            ]


@dataclass(frozen=True, slots=True)
class TableProgress:
    """The progress of one table at the source or in one sink."""

    sink: str
    """Name of the sink; empty for the table at the source."""
    topic: str
    """Topic of the table, `schema.table`."""
    state: str
    reason: str | None
    position: int
    version: int | None
    """Version of the target table; None for targets without versions."""
    rows: int
    recorded_at: datetime | None = None
    """Time at which the report was stored; the store sets this field."""

    @property
    def identity(self) -> tuple[str, str]:
        """The sink and the table that this progress is about."""
        return self.sink, self.topic

    @property
    def content(self) -> object:
        """What a report writes at once if it changed. The position is left out, because it moves without changes."""
        return self.state, self.reason, self.version, self.rows


class TableStore:
    """The store of table progress, which contains the last report on each table."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, pipeline: str, tables: Iterable[TableProgress]) -> None:
        """Store the progress of the given tables in one transaction; other tables do not change."""
        now = datetime.now(UTC)
        rows = [
            {
                "pipeline": pipeline,
                "sink": table.sink,
                "topic": table.topic,
                "state": table.state,
                "reason": table.reason,
                "position": int(table.position),
                "version": table.version,
                "rows": table.rows,
                "recorded_at": now,
            }
            for table in tables
        ]
        with self._database.writing() as session:
            upsert(session, TableRow, rows)

    def record_refused(self, pipeline: str, refused: Mapping[str, str]) -> None:
        """Replace the stored refused tables with `refused`, a map of topic to reason."""
        known = {t.topic: t.reason for t in self.ls(pipeline) if not t.sink and t.state == REFUSED}
        if known == refused:
            return
        no_longer = delete(TableRow).where(
            TableRow.pipeline == pipeline, TableRow.sink == "", TableRow.topic.in_(known.keys() - refused.keys())
        )
        with self._database.writing() as session:
            session.execute(no_longer)
        self.record(pipeline, (TableProgress("", topic, REFUSED, why, 0, None, 0) for topic, why in refused.items()))

    def forget(self, pipeline: str, sink: str, topics: Iterable[str]) -> None:
        """Delete the progress of tables in one sink, or at the source if `sink` is empty."""
        rows = delete(TableRow).where(
            TableRow.pipeline == pipeline, TableRow.sink == sink, TableRow.topic.in_(sorted(topics))
        )
        with self._database.writing() as session:
            session.execute(rows)

    def ls(self, pipeline: str) -> list[TableProgress]:
        """Return the last progress of each table, sorted by sink and topic."""
        query = select(TableRow).where(TableRow.pipeline == pipeline).order_by(TableRow.sink, TableRow.topic)
        with self._database.reading() as session:
            return [
                TableProgress(r.sink, r.topic, r.state, r.reason, r.position, r.version, r.rows, r.recorded_at)
                for r in session.scalars(query)
            ]


_P = TypeVar("_P", SinkProgress, TableProgress)


class RecordedProgress(Generic[_P]):
    """What the catalog has about the sinks or tables of one process, so that a report need not write all of them."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], object] = {}
        """`identity` of the progress that was written → its `content`."""
        self._all_due = 0.0

    def due(self, progress: Iterable[_P], now: float) -> list[_P]:
        """Return what a report writes: everything every RECORD_ALL_EVERY seconds, otherwise what has another `content`
        than the catalog. now: seconds of a monotonic clock.
        """
        if now >= self._all_due:
            self._all_due, self._known = now + RECORD_ALL_EVERY, {}
        due = [one for one in progress if self._known.get(one.identity) != one.content]
        self._known |= {one.identity: one.content for one in due}
        return due

    def forget(self) -> None:
        """Write everything with the next report, because the catalog may be a new one."""
        self._all_due = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A key of a table in one sink; the sink's target refused the latest row of this key."""

    sink: str
    topic: str
    key: tuple[str, ...]
    """Values of the key columns, as Postgres text."""
    position: int
    ordinal: int
    """Ordinal of the latest change of the key; `position` is the position of that change."""
    code: str
    message: str
    added_at: datetime
    """Time at which the key was first parked."""

    @property
    def id(self) -> str:
        """A short identifier, which stays the same while the key is parked."""
        return blake2b(json.dumps([self.sink, self.topic, *self.key]).encode(), digest_size=6).hexdigest()


class DeadLetterStore:
    """The store of copies of all dead letters; the originals are stored with each sink."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def mirror(self, pipeline: str, sink: str, letters: Iterable[DeadLetter]) -> None:
        """Replace all stored dead letters of a sink with the given ones, in one transaction."""
        row = DeadLetterRow
        rows = [
            {
                "pipeline": pipeline,
                "sink": sink,
                "position": int(letter.position),
                "ordinal": letter.ordinal,
                "topic": letter.topic,
                "key": list(letter.key),
                "code": letter.code,
                "message": letter.message,
                "added_at": letter.added_at,
            }
            for letter in letters
        ]
        with self._database.writing() as session:
            session.execute(delete(row).where(row.pipeline == pipeline, row.sink == sink))
            upsert(session, row, rows)

    def ls(self, pipeline: str, limit: int | None = None) -> list[DeadLetter]:
        """Return the oldest dead letters of the pipeline, in order of position; all of them if `limit` is None."""
        row = DeadLetterRow
        query = select(row).where(row.pipeline == pipeline).order_by(row.position, row.ordinal, row.sink)
        with self._database.reading() as session:
            return [
                DeadLetter(
                    sink=r.sink,
                    topic=r.topic,
                    key=tuple(r.key),
                    position=r.position,
                    ordinal=r.ordinal,
                    code=r.code,
                    message=r.message,
                    added_at=r.added_at,
                )
                for r in session.scalars(query.limit(limit))
            ]
