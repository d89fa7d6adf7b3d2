"""The demo's terminal output: lines with the seconds since the start."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, TextIO

_CLEAR: Final = "\r\x1b[K"


@dataclass(slots=True)
class Terminal:
    """Prints lines; on a terminal the last one may be overwritten."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    began: float = field(default_factory=monotonic)
    """Start of the demo as `time.monotonic()`."""
    _is_overwritable: bool = False

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return monotonic() - self.began

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._write(f"{self.seconds:5.1f}s  {text}\n")

    def done(self, subject: str, text: str) -> None:
        """Print a finished step, with what to try next."""
        self.say(f"✓ {subject:<10} {text}")

    def doing(self, subject: str, text: str) -> None:
        """Print a step that takes some time."""
        self.say(f"… {subject:<10} {text}")

    def failed(self, subject: str, text: str) -> None:
        """Print a failed step."""
        self.say(f"✗ {subject:<10} {text}")

    def update(self, text: str) -> None:
        """Print a status line; on a terminal the next one overwrites it."""
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
