"""The end of a long-running process: exit handlers run, but the interpreter is not finalized."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def exit_process(status: int) -> NoReturn:
    """End the process with `status`; only the main thread of a long-running process calls this, after its work.

    Libraries such as delta-rs, obstore and Arrow have threads of their own, which may call Python when a request ends.
    A normal exit deletes the interpreter while these threads run. A thread that then calls Python ends the process with
    SIGSEGV, or with SIGABRT and "terminate called without an active exception". The exit status is lost, and a
    supervisor takes a process that has stopped as requested for one that has failed. The more requests a process has
    made, the more such threads it has, so a process that runs for days needs this; a short command does not.

    The steps of a normal exit that have an effect outside the process happen here too, in the same order: threads that
    are not daemons end, exit handlers run (logging flushes, temporary directories are removed), and the output streams
    are flushed. Output that cannot be written does not change the status. The kernel then closes all files; Spark's JVM
    ends when its standard input is closed. Destructors and the exit handlers of C libraries do not run.
    """
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - no public function ends the threads of executors
    atexit._run_exitfuncs()  # noqa: SLF001 - no public function runs the handlers
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(status)
