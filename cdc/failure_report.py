"""Conversion of an unexpected exception into an error with a code; the traceback is printed only on request."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from pathlib import Path
from typing import Final

from cdc.errors import CdcError, FileUnusable

TRACEBACK: Final = "CDC_TRACEBACK"
"""Environment variable that makes commands print the traceback of an unexpected failure."""
_OUTPUT_FAILS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors of writing to the file to which the shell redirected the output."""


def error_to_report(error: BaseException, *, logs: bool = False) -> CdcError:
    """The error to report. An unexpected one shows only type and line, because its text may contain row values.

    logs: whether standard error is a process log, to which the traceback is written.
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
    """Discard buffered output, which the interpreter would otherwise write when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unusable(error: OSError) -> FileUnusable:
    reason = (error.strerror or type(error).__name__).lower()
    if error.filename is not None:
        return FileUnusable(f"cannot use {os.fsdecode(error.filename)!r}: {reason}")
    if error.errno in _OUTPUT_FAILS:
        discard_output()
        return FileUnusable(
            f"the output cannot be written: {reason}", remedy="free space on the file system of the output"
        )
    return FileUnusable(reason)
