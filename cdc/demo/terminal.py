"""The demo's terminal output: lines with the seconds since the start, the line of lags, and commands to paste."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Final, TextIO

from cdc.catalog import AWAITS_SPARK
from cdc.demo.pipeline_observer import LAKE, SEARCH, PipelineSnapshot
from cdc.service.status import COMPILING_ACTIVITY

_CLEAR: Final = "\r\x1b[K"
NAMES: Final = {SEARCH: "search", LAKE: "delta"}
"""Name of each sink in the line of lags, in the order of that line."""
OLD_AFTER: Final = 5.0
"""Seconds without progress after which the line of lags shows that time instead of the last lag."""
AWAITS_LOG: Final = "waits for the log"
NO_ROWS: Final = "no rows yet"


@dataclass(slots=True)
class Terminal:
    """Prints the lines of the demo; on a terminal the next line overwrites a status line."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    began: float = field(default_factory=monotonic)
    """Start of the demo as `time.monotonic()`."""
    _is_overwritable: bool = False

    @property
    def seconds(self) -> float:
        """Return the seconds since the start of the demo."""
        return monotonic() - self.began

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._write(f"{self.seconds:5.1f}s  {text}\n")

    def done(self, subject: str, text: str) -> None:
        """Print a line about a finished step."""
        self.say(f"✓ {subject:<10} {text}")

    def doing(self, subject: str, text: str) -> None:
        """Print a line about a step that has begun and takes some time."""
        self.say(f"… {subject:<10} {text}")

    def failed(self, subject: str, text: str) -> None:
        """Print a line about a failed step."""
        self.say(f"✗ {subject:<10} {text}")

    def update(self, text: str) -> None:
        """Print a status line, which the next line overwrites on a terminal."""
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


def lag_line(snapshot: PipelineSnapshot, sinks: Sequence[str]) -> str:
    """Return the line of lags, such as `log 0.05 s · search 0.41 s`; `snapshot.slow` follows if it is not None."""
    parts = [
        f"log {_log_lag(snapshot)}",
        *(f"{name} {_sink_lag(snapshot, sink)}" for sink, name in NAMES.items() if sink in sinks),
    ]
    line = " · ".join(parts)
    return f"{line}     {snapshot.slow}" if snapshot.slow else line


def _log_lag(snapshot: PipelineSnapshot) -> str:
    if snapshot.compiling:
        return COMPILING_ACTIVITY
    return _lag_text(snapshot.source_lag, snapshot.stalled.get("", 0.0))


def _sink_lag(snapshot: PipelineSnapshot, sink: str) -> str:
    stalled = snapshot.stalled.get(sink, 0.0)
    if sink not in snapshot.sinks:
        return AWAITS_SPARK if sink == LAKE else NO_ROWS
    if (snapshot.reasons.get(sink) or "").startswith(AWAITS_SPARK):
        return AWAITS_SPARK
    if snapshot.compiling and stalled <= OLD_AFTER:
        return AWAITS_LOG
    return _lag_text(snapshot.lag.get(sink), stalled)


def _lag_text(lag: float | None, stalled: float) -> str:
    if stalled > OLD_AFTER:
        return f"no new value for {stalled:.0f} s"
    return "–" if lag is None else f"{lag:.2f} s"


def display_path(path: Path) -> str:
    """Return a path quoted for a shell; a path below the working directory becomes relative."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def cdc_command(arguments: str, definition: Path) -> str:
    """Return the command `cdc ARGUMENTS -c DEFINITION`, with `uv run` if uv started the demo."""
    launcher = "uv run cdc" if "UV" in os.environ else "cdc"
    return f"{launcher} {arguments} -c {display_path(definition)}"
