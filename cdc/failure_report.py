"""What a person reads of a failure: an error with a code, and a traceback only where it is asked for."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from pathlib import Path
from typing import Final

from cdc.errors import CdcError, FileUnusable

TRACEBACK: Final = "CDC_TRACEBACK"
"""The variable that has the traceback of an unexpected failure printed."""
_OUTPUT_FAILS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What a file that the shell opened for the output may say."""


def reported(error: BaseException, *, logs: bool = False) -> CdcError:
    """The error to report; of one that nobody expected only type and place, for its text may have row values.

    logs: whether standard error is the log of a process, where the traceback belongs.
    """
    if isinstance(error, CdcError):
        return error
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
        return _unusable(error)
    if logs or os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return CdcError(
        f"unexpected {type(error).__name__} at {Path(last.filename).name}:{last.lineno}",
        remedy=f"run it again with {TRACEBACK}=1 and report what it prints",
    )


def discard_output() -> None:
    """Let what is still to be written to standard output go nowhere: the interpreter writes it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unusable(error: OSError) -> FileUnusable:
    said = (error.strerror or type(error).__name__).lower()
    if error.filename is not None:
        return FileUnusable(f"cannot use {os.fsdecode(error.filename)!r}: {said}")
    if error.errno in _OUTPUT_FAILS:
        discard_output()
        return FileUnusable(f"the output cannot be written: {said}", remedy="make room where the output goes")
    return FileUnusable(said)
