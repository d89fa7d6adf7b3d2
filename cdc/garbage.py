"""Search for garbage: Python looks for cycles among the objects of a process only rarely.

Nearly all objects are modules, classes and functions, and live as long as the process. With the default of 700 new
objects, searches took a sixth of the time of the imports, and 8 % of the CPU of a reader. Spark's Python worker even
looks for cycles after each task, which took a third of the time of a task that reads a chunk of a copy. This module
imports nothing large, because every command calls it first.
"""

from __future__ import annotations

import gc
from functools import cache
from typing import Final

RARELY: Final = 100_000
"""Number of new objects after which Python looks for cycles among them."""


@cache
def collect_garbage_rarely() -> None:
    """Look for cycles once per RARELY new objects, and never among the present objects.

    A process calls this when it has imported its modules. Later calls do nothing: they would keep what is garbage by
    then.
    """
    gc.freeze()
    gc.set_threshold(RARELY)
