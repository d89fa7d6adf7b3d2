"""Priority of threads: work that can wait leaves the processor to work that cannot."""

from __future__ import annotations

import os
import sys
from threading import get_native_id
from typing import Final

_NICEST: Final = 19


def lower_thread_priority(increment: int) -> None:
    """Increase the nice value of the calling thread; processes and threads that it starts inherit the value.

    A thread with 5 more gets a quarter of a core if a thread of normal priority competes for it, with 10 more a tenth.
    This works only on Linux, where each thread has its own nice value.
    """
    if sys.platform == "linux":
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, get_native_id(), min(_NICEST, nice + increment))
