"""Failpoints for tests: `CDC_FAILPOINT=after_append:3` kills the process at its third call of `hit("after_append")`.

Failpoints are inactive unless CDC_FAILPOINT is set. The process is killed by SIGKILL, so it flushes nothing.
With `slot_created:1:abandon`, the first call and each later one raise Abandoned instead, for a test that stops many
readers in its own process. With `slot_created:1:stop`, only the first call sends SIGSTOP to the process, so that a test
can let it continue.
"""

from __future__ import annotations

import os
import signal
from typing import Final

VARIABLE: Final = "CDC_FAILPOINT"
_passes: dict[str, int] = {}


class Abandoned(BaseException):
    """Exception that a failpoint with `:abandon` raises; no code of cdc handles it."""


def hit(name: str) -> None:
    """Kill the process at call n with this name if CDC_FAILPOINT is `name:n`; at the first call if it is `name`.

    The module describes the other actions.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    point, _, nth = wanted.partition(":")
    if point != name:
        return
    nth, _, how = nth.partition(":")
    _passes[name] = _passes.get(name, 0) + 1
    calls, first = _passes[name], int(nth or 1)
    if how == "stop":
        if calls == first:
            os.kill(os.getpid(), signal.SIGSTOP)
    elif calls >= first:
        if how == "abandon":
            raise Abandoned(name)
        os.kill(os.getpid(), signal.SIGKILL)
