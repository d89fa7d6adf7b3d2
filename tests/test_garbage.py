"""Search for garbage, in a process of its own, because the objects of the start are left out for ever."""

from __future__ import annotations

import subprocess
import sys

GARBAGE = """
import gc
from cdc.garbage import RARELY, collect_garbage_rarely

collect_garbage_rarely()
frozen = gc.get_freeze_count()
assert frozen > 1000 and gc.get_threshold()[0] == RARELY and gc.isenabled()

class Cycle:
    def __init__(self):
        self.me = self

for _ in range(2 * RARELY):
    Cycle()
assert gc.get_freeze_count() <= frozen
assert len(gc.get_objects()) < 2 * RARELY
"""


def test_the_objects_of_the_start_are_left_out_and_later_cycles_are_freed() -> None:
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
