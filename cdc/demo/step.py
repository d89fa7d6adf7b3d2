"""Step: one thing that the demo shows of a pipeline, how long it took, and whether it came out as it must."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event
from time import monotonic
from typing import Final, TypeVar

from cdc.demo.terminal import Terminal
from cdc.errors import CdcError, PositionNotReached

POLL_INTERVAL: Final = 0.1
"""Seconds between two looks at what is waited for."""
EXPLAIN_AFTER: Final = 3.0
"""Seconds of waiting after which the wait is text."""
WAIT_SECONDS: Final = 30.0
"""Seconds; what is waited for takes one or two on a machine that has nothing else to do."""

LINE_WIDTH: Final = 110
"""Characters of what is text and its hint, above which they stand in two lines."""
LINE_BREAK: Final = "\n" + " " * 21
"""To where the text of a line begins."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one part of the demo found."""

    text: str
    """For a person, in one line."""
    hint: str
    """A command that shows the same."""
    equal: bool
    """Whether it is as it must be."""
    rows: int = 0
    """That it concerns."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """For a program: what is text, by name."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stop of the demo."""

    name: str
    rows: int
    """Read again at the source, or of the log, or looked at."""
    seconds: float
    equal: bool
    """Whether it came out as it must; of a backfill and a replay, whether every target equalled its source."""
    facts: Mapping[str, object] = field(default_factory=dict)


def run_step(screen: Terminal, name: str, part: Callable[[], StepResult]) -> Step:
    """Do a part and tell it; one that cannot be shown is text with its reason and is not equal."""
    began = screen.seconds
    try:
        found = part()
    except CdcError as error:
        found = StepResult(f"{error.code} {error.message}", error.fix, equal=False, facts={"error": error.to_json()})
    report = screen.done if found.equal else screen.failed
    between = "   " if len(found.text) + len(found.hint) < LINE_WIDTH else LINE_BREAK
    report(name, f"{found.text}{between}try: {found.hint}")
    return Step(name, found.rows, round(screen.seconds - began, 2), found.equal, found.facts)


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits that end, and say what for when they last."""

    screen: Terminal
    subject: str
    """Under which they are text."""
    seconds: float = WAIT_SECONDS

    def until(self, what: str, look: Callable[[], Found | None]) -> Found:
        """The first thing that a look finds; raises PositionNotReached when it takes too long."""
        began, text, never = monotonic(), False, Event()
        while True:
            if found := look():
                return found
            waited = monotonic() - began
            if waited >= self.seconds:
                raise PositionNotReached(
                    f"{what}: not within {self.seconds:.0f} s", remedy="read what the processes printed"
                )
            if waited >= EXPLAIN_AFTER and not text:
                text = True
                self.screen.doing(self.subject, f"waits, {self.seconds:.0f} s at most: {what}")
            never.wait(POLL_INTERVAL)
