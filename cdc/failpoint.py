"""Failpoints for tests: `CDC_FAILPOINT=after_append:3` kills the process when it passes that point a third time.

Inactive unless the variable is set. The process then ends as with `kill -9`, without flushing anything.
`slot_created:1:abandon` raises Abandoned instead, for a test that stops hundreds of readers in its own process.
"""

from __future__ import annotations

import os
import signal
from typing import Final

VARIABLE: Final = "CDC_FAILPOINT"
_passes: dict[str, int] = {}


class Abandoned(BaseException):
    """A failpoint interrupted the work; no code of cdc handles this exception."""


def hit(name: str) -> None:
    """Kill the process if the variable names this failpoint and this pass (default: the first)."""
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
