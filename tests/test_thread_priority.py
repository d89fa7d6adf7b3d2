"""priority: a thread gives way, and the others do not with it."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import get_native_id

import pytest

from cdc.thread_priority import NICE_INCREMENT, lower_thread_priority


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="a priority is the process' there")
def test_a_thread_gives_way_to_the_others_of_its_process():
    before = nice()
    with ThreadPoolExecutor(1, initializer=lower_thread_priority) as pool:
        assert pool.submit(nice).result() == min(19, before + NICE_INCREMENT)
    assert nice() == before
