"""Landlock: denies this process every change of a file, on Linux 5.13 and later.

The kernel denies it to the calling thread and to every thread and process that it starts later, for their lifetime.
Files that are already open, such as standard output, stay writable, and so does `/dev/null`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, Final

_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
"""Numbers of system calls: the same on every architecture that CPython supports, except Alpha."""
_ASK_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_NO_NEW_PRIVILEGES: Final = 38
_WRITE_FILE: Final = 1 << 1
_WRITES: Final = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""The rights of version 1: write, remove and create files of every kind."""
_ADDED: Final = {2: 1 << 13, 3: 1 << 14}
"""Version of Landlock → the right that this version added: 2: move between directories; 3: truncate."""


def kernel_version() -> int:
    """The kernel's version of Landlock; 0 if the kernel does not have it or forbids it to the process."""
    if not sys.platform.startswith("linux"):
        return 0
    call = ctypes.CDLL(None, use_errno=True).syscall
    return max(0, call(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION))


def deny_file_writes() -> bool:
    """Deny every change of a file to this process; returns False if the kernel has no Landlock.

    Call it before libraries start their threads.
    """
    if (version := kernel_version()) == 0:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    added = sum(right for since, right in _ADDED.items() if version >= since)
    handled = ctypes.c_uint64(_WRITES | added)
    ruleset = _checked(call(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(ctypes.sizeof(handled)), 0))
    try:
        _allow(call, ruleset, os.devnull, _WRITE_FILE | added & _ADDED[3])
        _checked(ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(call(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


class _Beneath(ctypes.Structure):
    """`struct landlock_path_beneath_attr`."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("file", ctypes.c_int32))


def _allow(call: Any, ruleset: int, path: str, rights: int) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _Beneath(rights, file)
        _checked(call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(file)


def _checked(returned: int) -> int:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return returned
