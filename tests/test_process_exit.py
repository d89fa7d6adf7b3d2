"""A long-running process ends with its status although a thread of a library calls Python all the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.errors import ExitCode
from tests.fixtures import forked

FOREIGN_THREADS = """
import ctypes, threading

libc, called = ctypes.CDLL(None), threading.Event()
callback_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
callback = callback_type(lambda _: called.set())


class SignalEvent(ctypes.Structure):
    _fields_ = [
        ("value", ctypes.c_void_p), ("number", ctypes.c_int), ("notify", ctypes.c_int), ("function", callback_type),
        ("attributes", ctypes.c_void_p), ("padding", ctypes.c_byte * 64),
    ]


# the C library runs the callback in a thread of its own, every millisecond (SIGEV_THREAD, CLOCK_MONOTONIC)
timer = ctypes.c_void_p()
assert libc.timer_create(1, ctypes.byref(SignalEvent(notify=2, function=callback)), ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 1_000_000, 0, 1_000_000), None) == 0
called.wait()
libc.on_exit(libc.sleep, None)  # a finalized interpreter is called before the process ends: sleeps STATUS seconds
"""
"""Code that, followed by a normal exit with a status above 0, ends the process with SIGSEGV in Python 3.11."""

EXIT = """
import atexit, sys
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory
from cdc.process_exit import exit_process

folder = TemporaryDirectory(dir=sys.argv[1])
atexit.register(print, "an exit handler ran")
pool = ThreadPoolExecutor(1)
pool.submit(print, "the executor's task ran")  # its thread then waits for more
threading.Thread(target=lambda: (threading.main_thread().join(), print("the other thread ended"))).start()
exit_process(3)
"""

ENTRY = """
import sys
from importlib import import_module
sys.exit(import_module(sys.argv.pop(1)).main())
"""


def test_threads_end_exit_handlers_run_and_output_is_written(tmp_path: Path) -> None:
    ended = forked.run("tests.run_code", FOREIGN_THREADS + EXIT, tmp_path, finalized=True)

    assert ended.status == 3, ended.errors
    assert ended.output == "the executor's task ran\nthe other thread ended\nan exit handler ran\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [*(("cdc.__main__", name) for name in ("reader", "server", "deliver")), ("pipelines.__main__", "apply")],
)
def test_every_long_running_process_ends_with_its_status(command: tuple[str, str], tmp_path: Path) -> None:
    code = FOREIGN_THREADS + ENTRY
    ended = forked.run("tests.run_code", code, *command, "-c", tmp_path / "missing.yaml", finalized=True)

    assert ended.status == ExitCode.USAGE, ended.errors
    assert "missing.yaml" in ended.errors
