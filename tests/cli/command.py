"""The `cdc` command for tests, inside this process or as one of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from cdc.__main__ import main
from tests.fixtures import forked


@dataclass(frozen=True)
class Outcome(forked.Ended):
    """Exit status and what was printed."""

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
    done = forked.run("cdc", *arguments, environment=environment)
    return Outcome(**vars(done))
