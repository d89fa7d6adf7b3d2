"""Priority of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import get_native_id

import pytest

from cdc.thread_priority import lower_thread_priority


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, get_native_id())


def nice_of_child() -> int:
    return int(subprocess.run(["nice"], capture_output=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only a process has a priority")
@pytest.mark.parametrize("increment", [5, 40])
def test_a_thread_and_its_child_processes_give_way_to_the_others(increment: int) -> None:
    before = nice()
    with ThreadPoolExecutor(1, initializer=lower_thread_priority, initargs=(increment,)) as pool:
        expected = min(19, before + increment)
        assert pool.submit(nice).result() == expected
        assert pool.submit(nice_of_child).result() == expected
    assert nice() == before
