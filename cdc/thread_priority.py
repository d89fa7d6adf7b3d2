"""Priority: threads whose work is worth doing when the others have none."""

from __future__ import annotations

import os
import sys
from threading import get_native_id
from typing import Final

GIVEN_WAY: Final = 10
"""By how much nicer: beside a thread that did not, a tenth of a core's time, and all that nobody asks for."""
_NICEST: Final = 19


def give_way() -> None:
    """Let the calling thread come after the others wherever cores are scarce; on Linux, which has this of a thread."""
    if sys.platform == "linux":
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, get_native_id(), min(_NICEST, nice + GIVEN_WAY))
