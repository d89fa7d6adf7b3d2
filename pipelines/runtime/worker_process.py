"""The Python worker of Spark in which a task runs: whether this process is one, and its garbage collections.

Spark collects all garbage of a worker after each task, and the next task waits for that. The modules of cdc and of its
libraries are hundreds of thousands of objects, which live as long as the worker. To visit them takes 70 ms of CPU, more
than a task with few rows itself.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

from cdc.garbage import RARELY

FULL: Final = 2
"""The generation of a collection that visits every object."""


def is_task() -> bool:
    """Return whether this code runs in a task of an executor."""
    if "pyspark" not in sys.modules:  # importing it takes a second
        return False
    from pyspark import TaskContext

    return TaskContext.get() is not None


def collect_garbage_rarely_in_task() -> None:
    """In a task: collect garbage less often, and let later full collections skip the modules loaded by then."""
    if _freeze_new_modules not in gc.callbacks and is_task():
        gc.set_threshold(RARELY)
        gc.callbacks.append(_freeze_new_modules)


class _Freeze:
    """After a full collection, freezes what is left, if modules were loaded since the last time.

    A frozen object is freed when nothing refers to it any longer, but a cycle of frozen objects never is. So a worker
    freezes only a few times.
    """

    def __init__(self) -> None:
        self._modules = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == FULL and len(sys.modules) > self._modules:
            self._modules = len(sys.modules)
            gc.freeze()


_freeze_new_modules: Final = _Freeze()
