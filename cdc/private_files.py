"""Modes of files: what the product makes is for the account that runs it, whatever umask it was started with.

The log and the catalog contain rows as they are before any mask. They are private always: their own modes say so.
Everything else, a lake among it, follows the umask of our processes: 0077, or what CDC_UMASK says, which is how an
operator shares a lake with a group. A directory that is there already keeps its mode.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cdc.errors import ConfigError

VARIABLE: Final = "CDC_UMASK"
PRIVATE_UMASK: Final = 0o077
_DIRECTORY: Final = 0o700
_FILE: Final = 0o600
_ENTER: Final = stat.S_IXGRP | stat.S_IXOTH
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def product_umask() -> Iterator[None]:
    """Run a process of ours under its umask; children and the JVM inherit it. Raises ConfigError."""
    previous = os.umask(wanted_umask())
    try:
        yield
    finally:
        os.umask(previous)


def wanted_umask() -> int:
    """The umask of CDC_UMASK, or the private one."""
    text = os.environ.get(VARIABLE, "")
    if text and not re.fullmatch("0?[0-7]{3}", text):
        raise ConfigError(
            f"{VARIABLE}: expected three octal digits, got {text!r}", remedy=f"set {VARIABLE}=0027, or none"
        )
    return int(text, 8) if text else PRIVATE_UMASK


def make_private_directory(path: Path) -> None:
    """Make the directory, and those above it, unless it is there."""
    path.mkdir(mode=_DIRECTORY, parents=True, exist_ok=True)


def make_private_file(path: Path) -> None:
    """Make an empty file unless it is there; SQLite gives the files next to a database its mode.

    A file that is there is not even opened: to close it would release the locks that SQLite has on it in this process
    (POSIX ties them to the process and the file), and another process would then delete the WAL that is in use.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDONLY, _FILE))


def is_exposed(path: Path) -> bool:
    """Whether another account of this machine may reach the path and do something there, by the mode of each part."""
    try:
        is_open = path.stat().st_mode & _OTHERS
        return bool(is_open) and all(above.stat().st_mode & _ENTER for above in path.resolve().parents)
    except OSError:
        return False
