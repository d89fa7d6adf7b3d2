"""Report of a demo: verified tables, freshness and steps, for a person and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from cdc.demo.step import Step
from cdc.demo.verification_step import TableVerification


@dataclass(slots=True)
class DemoReport:
    """What the demo found."""

    tables: list[TableVerification] = field(default_factory=list)
    freshness: dict[str, float | None] = field(default_factory=dict)
    changes: int = 0
    first_row_seconds: dict[str, float | None] = field(
        default_factory=lambda: {"log": None, "delta": None, "search": None}
    )

    tour: list[Step] = field(default_factory=list)
    """Steps that ran during the workload."""
    closing: list[Step] = field(default_factory=list)
    """Steps that ran after the workload."""

    @property
    def equal(self) -> bool:
        """Whether there are tables, all of them equal their source, and no step failed."""
        equal = all(table.equal for table in self.tables) and all(step.equal for step in (*self.tour, *self.closing))
        return bool(self.tables) and equal

    @property
    def summary(self) -> str:
        """Tables, changes and failed steps in one line."""
        equal = sum(table.equal for table in self.tables)
        failed = [step.name for step in (*self.tour, *self.closing) if not step.equal]
        text = f"{equal}/{len(self.tables)} tables equal, {self.changes:,} changes"
        return f"{text}; failed: {', '.join(failed)}" if failed else text

    def to_json(self) -> dict[str, Any]:
        """The `result` of the command's envelope."""
        return {
            "tables": [{"name": t.name, "rows": t.rows, "equal": t.equal} for t in self.tables],
            "freshness": self.freshness,
            "changes": self.changes,
            "first_row_seconds": self.first_row_seconds,
            "tour": [asdict(step) for step in self.tour],
            "closing": [asdict(step) for step in self.closing],
        }
