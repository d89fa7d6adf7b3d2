"""Results of the demo: of one step, which can wait for conditions, and the report of the whole demo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from threading import Event
from time import monotonic
from typing import Any, Final, TypeVar

from cdc.demo.terminal import Terminal
from cdc.demo.verification_step import TableVerification
from cdc.errors import CdcError, PositionNotReached

POLL_INTERVAL: Final = 0.1
"""Seconds between two checks of a condition."""
EXPLAIN_AFTER: Final = 3.0
"""Seconds of waiting after which the wait is explained."""
WAIT_SECONDS: Final = 30.0
"""Seconds that a wait may take; on an idle machine it takes one or two."""

LINE_WIDTH: Final = 110
"""Characters of text and hint above which they are printed on two lines."""
LINE_BREAK: Final = "\n" + " " * 21
"""Line break and indent to the column of the text."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step found."""

    text: str
    """Result for a person, in one line."""
    hint: str
    """A command that shows the same."""
    equal: bool
    """Whether the result is right."""
    rows: int = 0
    """Number of rows that it concerns."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """The same result for a program."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a step in the report."""

    name: str
    rows: int
    """Rows read at the source, in the log, or in a target."""
    seconds: float
    equal: bool
    """Whether the result was right; of a backfill and a replay, whether every target equalled its source."""
    facts: Mapping[str, object] = field(default_factory=dict)


def run_step(screen: Terminal, name: str, step: Callable[[], StepResult]) -> Step:
    """Run a step and print its result; if it raises, print its error and count it as not equal."""
    began = screen.seconds
    try:
        found = step()
    except CdcError as error:
        found = StepResult(f"{error.code} {error.message}", error.fix, equal=False, facts={"error": error.to_json()})
    report = screen.done if found.equal else screen.failed
    between = "   " if len(found.text) + len(found.hint) < LINE_WIDTH else LINE_BREAK
    report(name, f"{found.text}{between}try: {found.hint}")
    return Step(name, found.rows, round(screen.seconds - began, 2), found.equal, found.facts)


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits for conditions, and explains long waits."""

    screen: Terminal
    subject: str
    """Subject of the printed line."""
    seconds: float = WAIT_SECONDS

    def until(self, what: str, check: Callable[[], Found | None]) -> Found:
        """Return the first true value of `check`; raises PositionNotReached after `seconds`."""
        began, is_explained, never = monotonic(), False, Event()
        while True:
            if found := check():
                return found
            waited = monotonic() - began
            if waited >= self.seconds:
                raise PositionNotReached(
                    f"the demo waited {self.seconds:.0f} s, but this did not happen: {what}",
                    remedy="read the output of the processes",
                )
            if waited >= EXPLAIN_AFTER and not is_explained:
                is_explained = True
                self.screen.doing(self.subject, f"waiting up to {self.seconds:.0f} s: {what}")
            never.wait(POLL_INTERVAL)


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
