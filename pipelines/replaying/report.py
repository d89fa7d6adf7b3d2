"""The report of a replay or of its dry run: rows, bytes, seconds and state of each table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from cdc.position import Position
from cdc.targets.published_record import Published, TableRecord, TargetState
from pipelines.replaying.plan import ReplayPlan
from pipelines.replaying.rebuild import LARGE
from pipelines.replaying.table_sizes_in_log import TableContents
from pipelines.sink_kinds import kind_of

TABLE_SECONDS: Final = 0.3
"""Estimated seconds of a table without rows: a target is created, committed to, and put in place."""
START_SECONDS: Final = 3.0
"""Estimated seconds until the first table is built, and from the last one until the sink continues."""
SPARK_SECONDS: Final = 15.0
"""Estimated seconds until the Spark session has started; only a large table needs a session."""

_COPIES_NOTE: Final = (
    "a rule changes only the targets of its own sink: the change log still contains the hidden values, and other sinks "
    "or copies of the target may contain them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedTable:
    """One table of a replay or of a dry run."""

    topic: str
    rows: int
    """Number of rows in the log, before the fold."""
    bytes: int
    """Bytes of the table in the files of the log."""
    seconds: float
    """Measured or estimated duration."""
    state: str
    """A TargetState, or `planned` in a dry run."""
    target: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The result of one replay; its fields are those of the JSON output."""

    sink: str
    position: Position
    into: str | None
    dry_run: bool
    seconds: float
    tables: tuple[ReplayedTable, ...]
    notes: tuple[str, ...] = ()
    """Further information for the operator; each note is one sentence."""

    @property
    def ok(self) -> bool:
        """Whether every table was built."""
        return all(table.state != TargetState.FAILED for table in self.tables)

    @property
    def rows(self) -> int:
        """Number of log rows of all tables, before the fold."""
        return sum(table.rows for table in self.tables)

    @property
    def summary(self) -> str:
        """The result as one line of text."""
        what = f"{len(self.tables)} tables of {self.sink}, {self.rows:,} rows of the log up to {self.position}"
        if self.dry_run:
            size = sum(table.bytes for table in self.tables)
            return f"would build {what}, {size:,} bytes, in about {self.seconds:,.0f} s; nothing was changed"
        where = "in place" if self.into is None else f"into {self.into}"
        rate = f"{self.rows / max(self.seconds, 1e-3):,.0f} rows/s"
        copying = sum(table.state == TargetState.SNAPSHOTTING for table in self.tables)
        rest = f"; tables whose full copy has not ended: {copying}" if copying else ""
        return f"built {what}, {where}, in {self.seconds:,.1f} s, {rate}{rest}"

    def to_json(self) -> dict[str, Any]:
        """Return the content of the JSON envelope."""
        return asdict(self) | {"position": str(self.position), "rows": self.rows}


def estimate_report(plan: ReplayPlan) -> ReplayReport:
    """Return the report of a dry run."""
    rate = kind_of(plan.wanted).replayed_rows_per_second
    tables = [
        ReplayedTable(
            topic=table.topic,
            rows=table.rows,
            bytes=table.size,
            seconds=TABLE_SECONDS + table.rows / rate,
            state="planned",
        )
        for table in plan.tables
    ]
    start = START_SECONDS + (SPARK_SECONDS if any(table.rows > LARGE for table in tables) else 0.0)
    return _report(plan, plan.upto, start + sum(table.seconds for table in tables), tables)


def final_report(plan: ReplayPlan, published: Published, seconds: Mapping[int, float], took: float) -> ReplayReport:
    """Return the report of a finished replay. seconds: relation → duration; took: seconds of the whole replay."""
    tables = [
        _table(table, published.tables[table.relation], seconds.get(table.relation, 0.0)) for table in plan.tables
    ]
    return _report(plan, Position(published.position), took, tables)


def erased_files_notes(erased: Mapping[str, int], tables: Iterable[TableRecord]) -> list[str]:
    """Return one note per target from which the replay removed files with hidden values, and a note about copies.

    Hidden values are those that the sink's present rules drop or mask. erased: target → number of removed files.
    """
    topics: dict[str, list[str]] = {}
    for table in tables:
        topics.setdefault(table.target, []).append(table.topic)
    notes = [
        f"{', '.join(topics.get(target, [target]))}: removed the earlier cuts and {files} "
        f"{'file' if files == 1 else 'files'} of the target, because they contained values that the rules now hide"
        for target, files in erased.items()
    ]
    return [*notes, _COPIES_NOTE] if notes else []


def _table(table: TableContents, record: TableRecord, seconds: float) -> ReplayedTable:
    return ReplayedTable(
        topic=table.topic,
        rows=table.rows,
        bytes=table.size,
        seconds=seconds,
        state=record.state,
        target=record.target,
        reason=record.reason,
    )


def _report(plan: ReplayPlan, position: Position, seconds: float, tables: Sequence[ReplayedTable]) -> ReplayReport:
    return ReplayReport(
        sink=plan.wanted.name,
        position=position,
        into=plan.options.into,
        dry_run=plan.options.dry_run,
        seconds=seconds,
        tables=tuple(tables),
    )
