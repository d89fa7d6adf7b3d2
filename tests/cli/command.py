"""The `cdc` command for tests, inside this process or as one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from cdc.__main__ import main


@dataclass(frozen=True)
class Outcome:
    """Exit status and what was printed."""

    status: int
    output: str
    errors: str

    @property
    def envelope(self) -> dict[str, Any]:
        """The one JSON envelope on standard output."""
        found: dict[str, Any] = json.loads(self.output)
        assert list(found) == ["command", "ok", "summary", "result", "error"]
        return found


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> Outcome:
    """The command inside this process."""
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return Outcome(status, printed.out, printed.err)


def spawn(*arguments: object, environment: Mapping[str, str] | None = None) -> Outcome:
    """The command as a process."""
    done = subprocess.run(
        [sys.executable, "-m", "cdc", *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
