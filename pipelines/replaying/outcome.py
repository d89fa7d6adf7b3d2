"""Outcome: what a replay did, or what it would do, for a person and for a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from cdc.position import Position
from cdc.stores.published import Published, TableRecord, TargetState
from pipelines.replaying.log_contents import TableContents
from pipelines.replaying.rebuild import LARGE
from pipelines.replaying.request import ReplayPlan

ROWS_PER_SECOND: Final = {"delta": 200_000, "search": 8_000}
"""Of the log, by type of sink, on two cores with ten columns; what an estimate of time rests on."""
SPARK_SECONDS: Final = 15.0
"""Until Spark is up and warm, when a table is large enough to need it."""


_COPIES_NOTE: Final = (
    "a rule acts on the targets of its own sink: the change log has the values as the source sent them, and so have "
    "other sinks and copies that were made of the target"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedTable:
    """One table of a replay, done or only planned."""

    topic: str
    rows: int
    """In the log, before the fold."""
    bytes: int
    """Of the log's files."""
    seconds: float
    """How long it took, or is expected to take."""
    state: str
    """A TargetState, or `estimate_report`."""
    target: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The outcome of one run."""

    sink: str
    position: Position
    into: str | None
    dry_run: bool
    seconds: float
    tables: tuple[ReplayedTable, ...]
    notes: tuple[str, ...] = ()
    """What else a person has to know, a sentence each."""

    @property
    def ok(self) -> bool:
        """Whether every table was built."""
        return all(table.state != TargetState.FAILED for table in self.tables)

    @property
    def rows(self) -> int:
        """Of the log."""
        return sum(table.rows for table in self.tables)

    @property
    def summary(self) -> str:
        """One line for a person."""
        what = f"{len(self.tables)} tables of {self.sink}, {self.rows:,} rows of the log up to {self.position}"
        if self.dry_run:
            size = sum(table.bytes for table in self.tables)
            return f"would build {what}, {size:,} bytes, in about {self.seconds:,.0f} s; nothing was done"
        where = "in place" if self.into is None else f"into {self.into}"
        rate = f"{self.rows / max(self.seconds, 1e-3):,.0f} rows/s"
        copying = sum(table.state == TargetState.SNAPSHOTTING for table in self.tables)
        rest = f"; the full copy of {copying} has not ended" if copying else ""
        return f"built {what}, {where}, in {self.seconds:,.1f} s, {rate}{rest}"

    def to_json(self) -> dict[str, Any]:
        """The envelope's result."""
        return asdict(self) | {"position": str(self.position), "rows": self.rows}


def estimate_report(request: ReplayPlan) -> ReplayReport:
    """What a dry run says."""
    rate = ROWS_PER_SECOND[request.wanted.type]
    tables = [
        ReplayedTable(topic=table.topic, rows=table.rows, bytes=table.size, seconds=table.rows / rate, state="planned")
        for table in request.tables
    ]
    start = SPARK_SECONDS if any(table.rows > LARGE for table in tables) else 0.0
    return _report(request, request.upto, start + sum(table.seconds for table in tables), tables)


def final_report(request: ReplayPlan, published: Published, seconds: Mapping[int, float], took: float) -> ReplayReport:
    """What was done; seconds: by relation, how long each table took; took: all of it."""
    tables = [
        _table(table, published.tables[table.relation], seconds.get(table.relation, 0.0)) for table in request.tables
    ]
    return _report(request, Position(published.position), took, tables)


def erased_files_notes(erased: Mapping[str, int], tables: Iterable[TableRecord]) -> list[str]:
    """What was removed because the rules hide it, and where it still is; erased: by target."""
    topics: dict[str, list[str]] = {}
    for table in tables:
        topics.setdefault(table.target, []).append(table.topic)
    notes = [
        f"{', '.join(topics.get(target, [target]))}: removed its earlier cuts and {files} "
        f"{'file' if files == 1 else 'files'} of its target, which have what its rules hide now"
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


def _report(request: ReplayPlan, position: Position, seconds: float, tables: Sequence[ReplayedTable]) -> ReplayReport:
    return ReplayReport(
        sink=request.wanted.name,
        position=position,
        into=request.options.into,
        dry_run=request.options.dry_run,
        seconds=seconds,
        tables=tuple(tables),
    )
