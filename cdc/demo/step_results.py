"""Results of the demo's steps, a class that waits for conditions, and the report of the whole demo."""

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
"""Seconds of waiting after which the demo explains the wait."""
WAIT_SECONDS: Final = 30.0
"""Maximum seconds to wait for a condition; on an idle machine a condition takes one or two seconds."""

LOCAL_ENGINE: Final = "tantivy"
"""Engine of the search sink without a cluster."""
LINE_WIDTH: Final = 110
"""If text and hint of a step together have this number of characters or more, they are printed on two lines."""
LINE_BREAK: Final = "\n" + " " * 21
"""Line break before a hint, with the indent that aligns the hint with the text."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step of the demo, before the step is timed and reported."""

    text: str
    """One line for the terminal that describes the result."""
    hint: str
    """Command that shows the same result."""
    equal: bool
    """True if the step found the expected values."""
    rows: int = 0
    """Number of rows that the step wrote or compared."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """The result as values for the JSON report."""


@dataclass(frozen=True, slots=True)
class Step:
    """A completed step in the report of the demo."""

    name: str
    rows: int
    """Number of rows that the step wrote or compared."""
    seconds: float
    equal: bool
    """True if the step found the expected values; for backfill and replay, if every target equals the source."""
    facts: Mapping[str, object] = field(default_factory=dict)


def run_step(screen: Terminal, name: str, step: Callable[[], StepResult]) -> Step:
    """Run a step, print its result and return the completed step.

    If the step raises a CdcError, the result is the error, with `equal` False.
    """
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
    """Waits for conditions, and prints the reason of a wait that is longer than EXPLAIN_AFTER."""

    screen: Terminal
    subject: str
    """Subject of the line that explains a long wait."""
    seconds: float = WAIT_SECONDS

    def until(self, what: str, check: Callable[[], Found | None]) -> Found:
        """Call `check` until it returns a true value, and return that value.

        `what` describes the condition in messages. Raises PositionNotReached after `self.seconds` seconds.
        """
        began, is_explained, never = monotonic(), False, Event()
        while True:
            if found := check():
                return found
            waited = monotonic() - began
            if waited >= self.seconds:
                raise PositionNotReached(
                    f"the demo waited {self.seconds:.0f} s, but this did not happen: {what}",
                    remedy="run the demo with --keep, and read the *.out files in its state folder",
                )
            if waited >= EXPLAIN_AFTER and not is_explained:
                is_explained = True
                self.screen.doing(self.subject, f"waiting up to {self.seconds:.0f} s: {what}")
            never.wait(POLL_INTERVAL)


@dataclass(slots=True)
class DemoReport:
    """Results of all steps and verifications of one run of the demo."""

    tables: list[TableVerification] = field(default_factory=list)
    freshness: dict[str, float | None] = field(default_factory=dict)
    changes: int = 0
    search: str = LOCAL_ENGINE
    """Engine of the search sink; for a cluster, also its URL and the names of the indexes."""
    first_row_seconds: dict[str, float | None] = field(
        default_factory=lambda: {"log": None, "delta": None, "search": None}
    )

    tour: list[Step] = field(default_factory=list)
    """Steps that ran during the workload."""
    closing: list[Step] = field(default_factory=list)
    """Steps that ran after the workload."""

    @property
    def equal(self) -> bool:
        """Return True if tables were compared, all of them equal the source, and no step failed."""
        equal = all(table.equal for table in self.tables) and all(step.equal for step in (*self.tour, *self.closing))
        return bool(self.tables) and equal

    @property
    def summary(self) -> str:
        """Return the numbers of tables and changes, and the failed steps, in one line."""
        equal = sum(table.equal for table in self.tables)
        failed = [step.name for step in (*self.tour, *self.closing) if not step.equal]
        text = f"{equal}/{len(self.tables)} tables equal, {self.changes:,} changes"
        if self.search != LOCAL_ENGINE:
            text += f", search in {self.search}"
        return f"{text}; failed: {', '.join(failed)}" if failed else text

    def to_json(self) -> dict[str, Any]:
        """Return the report as the `result` of the command's JSON output."""
        return {
            "tables": [{"name": t.name, "rows": t.rows, "equal": t.equal} for t in self.tables],
            "freshness": self.freshness,
            "changes": self.changes,
            "search": self.search,
            "first_row_seconds": self.first_row_seconds,
            "tour": [asdict(step) for step in self.tour],
            "closing": [asdict(step) for step in self.closing],
        }
