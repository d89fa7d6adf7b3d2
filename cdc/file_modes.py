"""File modes: files that cdc creates are private to its account, independent of the umask that the process inherits.

The log and the catalog contain unmasked rows, so they are always created with modes 0700 and 0600. All other files,
such as those of a lake, follow the umask of cdc's processes: 0077, or the value of CDC_UMASK. An operator sets
CDC_UMASK to share a lake with a group. An existing directory keeps its mode.
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
    """Set cdc's umask inside the block; child processes and the JVM inherit it.

    Raises ConfigError if CDC_UMASK is invalid.
    """
    previous = os.umask(configured_umask())
    try:
        yield
    finally:
        os.umask(previous)


def configured_umask() -> int:
    """Return the umask from CDC_UMASK; 0077 if the variable is not set. Raises ConfigError for an invalid value."""
    text = os.environ.get(VARIABLE, "")
    if text and not re.fullmatch("0?[0-7]{3}", text):
        raise ConfigError(
            f"{VARIABLE}: expected three octal digits, got {text!r}",
            remedy=f"set {VARIABLE} to three octal digits, for example {VARIABLE}=0027, or unset it",
        )
    return int(text, 8) if text else PRIVATE_UMASK


def make_private_directory(path: Path) -> None:
    """Create the directory and its missing parents, with mode 0700."""
    path.mkdir(mode=_DIRECTORY, parents=True, exist_ok=True)


def make_private_file(path: Path) -> None:
    """Create an empty file with mode 0600 unless it exists; SQLite gives the WAL files of a database the same mode.

    The function does not open an existing file. POSIX locks belong to the process, so closing the file would release
    the locks that SQLite has on it in this process. Another process could then delete the WAL in use.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDONLY, _FILE))


def is_exposed(path: Path) -> bool:
    """Return True if the file modes let another account of this machine access the path."""
    try:
        is_open = path.stat().st_mode & _OTHERS
        return bool(is_open) and all(above.stat().st_mode & _ENTER for above in path.resolve().parents)
    except OSError:
        return False
