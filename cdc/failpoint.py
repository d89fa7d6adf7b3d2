"""Named points where a test kills the process: `CDC_FAILPOINT=after_append:3` dies at the third pass.

Off unless the variable is set; then the process ends as under `kill -9`, with nothing flushed.
"""

from __future__ import annotations

import os
import signal
from typing import Final

VARIABLE: Final = "CDC_FAILPOINT"
_passes: dict[str, int] = {}


def hit(name: str) -> None:
    """Die here if the variable names this point and this is the pass it asks for (default: the first)."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    point, _, nth = wanted.partition(":")
    if point != name:
        return
    _passes[name] = _passes.get(name, 0) + 1
    if _passes[name] >= int(nth or 1):
        os.kill(os.getpid(), signal.SIGKILL)
