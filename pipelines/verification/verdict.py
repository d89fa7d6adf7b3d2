"""Verdicts: what a comparison says of one table in one sink, and of all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from cdc.config.job_options import VerifyMode
from cdc.position import Position
from cdc.stores.published import TargetState

UNREADABLE: Final = "unreadable"
"""Of every table of a sink whose store cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableVerdict:
    """One table in one sink."""

    sink: str
    topic: str
    equal: bool
    """Nothing was found; of parked keys nothing is said."""
    rows: int = 0
    """Of the source, or of what the log says, at the cut."""
    target_rows: int = 0
    state: str = TargetState.STREAMING.value
    """A TargetState, `absent` when the sink does not list the table, or `unreadable` when its store cannot be read."""
    reason: str | None = None
    """Why nothing was compared, what the target lacks, or why it was looked at less or more closely than asked."""
    mode: str = VerifyMode.ROWS.value
    """How closely it was looked at."""
    compared: bool = False
    """Whether it was; if not, the reason says why."""
    missing: list[list[str | None]] = field(default_factory=list)
    """Keys that only the source has, the first of them."""
    extra: list[list[str | None]] = field(default_factory=list)
    """Keys that only the target has, the first of them."""
    differing: list[dict[str, Any]] = field(default_factory=list)
    """{"key", "columns"} of rows that differ, the first of them."""
    counts: dict[str, int] = field(default_factory=dict)
    """How many of each, all counted while `complete`."""
    complete: bool = True
    parked: int = 0
    """Keys whose changes wait in dead letters: their rows are older than the cut, and not compared."""
    parked_keys: list[list[str]] = field(default_factory=list)
    """The first of them."""

    @property
    def mismatched(self) -> int:
        """Rows that differ, as far as they were told apart; at least 1 of a table that is not equal."""
        found = sum(self.counts.values()) or abs(self.rows - self.target_rows)
        return 0 if self.equal else max(1, found)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The outcome of one run."""

    position: Position
    """Where all sinks were compared; against the log the lowest at which one was."""
    tables: tuple[TableVerdict, ...]

    @property
    def equal(self) -> bool:
        """Every table in every sink."""
        return all(verdict.equal for verdict in self.tables)

    @property
    def summary(self) -> str:
        """One line for a person."""
        equal = sum(verdict.equal for verdict in self.tables)
        rows = sum(verdict.rows for verdict in self.tables)
        parked = sum(verdict.parked for verdict in self.tables)
        apart = f", {parked:,} parked keys not compared" if parked else ""
        return f"{equal}/{len(self.tables)} tables equal, {rows:,} rows at {self.position}{apart}"

    def to_json(self) -> dict[str, Any]:
        """The envelope's result."""
        return {"position": str(self.position), "tables": [asdict(verdict) for verdict in self.tables]}
