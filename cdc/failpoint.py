"""Named points where a test kills the process: `CDC_FAILPOINT=after_append:3` dies at the third pass.

Off unless the variable is set; then the process ends as under `kill -9`, with nothing flushed. `slot_created:1:abandon`
raises Abandoned instead, for a test that kills hundreds of readers inside its own process.
"""

from __future__ import annotations

import os
import signal
from typing import Final

VARIABLE: Final = "CDC_FAILPOINT"
_passes: dict[str, int] = {}


class Abandoned(BaseException):
    """The work was left where it was; no code of ours handles it."""


def hit(name: str) -> None:
    """Die here if the variable names this point and this is the pass it asks for (default: the first)."""
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
