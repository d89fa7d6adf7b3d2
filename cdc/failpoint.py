"""Failpoints for tests: `CDC_FAILPOINT=after_append:3` kills the process when it passes that point a third time.

Failpoints are inactive unless the variable is set. A killed process ends as with `kill -9`: it flushes nothing.
`slot_created:1:abandon` raises Abandoned instead, for a test that stops hundreds of readers in its own process.
"""

from __future__ import annotations

import os
import signal
from typing import Final

VARIABLE: Final = "CDC_FAILPOINT"
_passes: dict[str, int] = {}


class Abandoned(BaseException):
    """A failpoint with `:abandon` raises this exception; no code of cdc handles the exception."""


def hit(name: str) -> None:
    """Kill the process if CDC_FAILPOINT names this failpoint and the process passes it for the nth time (default 1)."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    point, _, nth = wanted.partition(":")
    if point != name:
        return
    nth, _, how = nth.partition(":")
    _passes[name] = _passes.get(name, 0) + 1
    if _passes[name] >= int(nth or 1):
        if how == "abandon":
            raise Abandoned(name)
        os.kill(os.getpid(), signal.SIGKILL)
