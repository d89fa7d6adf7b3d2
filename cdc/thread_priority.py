"""Lower scheduling priority for threads of background work."""

from __future__ import annotations

import os
import sys
from threading import get_native_id
from typing import Final

NICE_INCREMENT: Final = 10
"""Increase of the nice value: about a tenth of a core next to a thread of normal priority, and all idle time."""
_NICEST: Final = 19


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread; only on Linux, where each thread has its own nice value."""
    if sys.platform == "linux":
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, get_native_id(), min(_NICEST, nice + NICE_INCREMENT))
