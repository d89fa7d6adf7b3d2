"""Screen: the demo's lines for a person, each with the seconds since the start."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, TextIO

_CLEAR: Final = "\r\x1b[K"


@dataclass(slots=True)
class Terminal:
    """Prints lines; one of them, the last, may be written over when a terminal listens."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    began: float = field(default_factory=monotonic)
    """`time.monotonic()` of the first moment."""
    _is_overwritable: bool = False

    @property
    def seconds(self) -> float:
        """Since the start."""
        return monotonic() - self.began

    def say(self, text: str) -> None:
        """A line that stays."""
        self._write(f"{self.seconds:5.1f}s  {text}\n")

    def done(self, subject: str, text: str) -> None:
        """A step that is done, with what the user may do next."""
        self.say(f"✓ {subject:<10} {text}")

    def doing(self, subject: str, text: str) -> None:
        """A step that takes its time."""
        self.say(f"… {subject:<10} {text}")

    def failed(self, subject: str, text: str) -> None:
        """A step that failed."""
        self.say(f"✗ {subject:<10} {text}")

    def update(self, text: str) -> None:
        """A line of figures: written over by the next on a terminal, a line of its own elsewhere."""
        if self.out.isatty():
            self.out.write(f"{_CLEAR}        {text}")
            self.out.flush()
            self._is_overwritable = True
        else:
            self.say(f"  {text}")

    def _write(self, text: str) -> None:
        if self._is_overwritable:
            self.out.write(_CLEAR)
            self._is_overwritable = False
        self.out.write(text)
        self.out.flush()
