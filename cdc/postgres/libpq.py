"""libpq: the C functions that the receive loop calls by their addresses, and the check that these can be called.

psycopg has no call that copies all messages that have arrived, so `copy_data_receiver` calls the functions of the libpq
that psycopg has loaded. It needs no others than those of LibpqFunctions, which are public and block nobody: in the
asynchronous mode of COPY, `PQgetCopyData` returns at once, and `PQconsumeInput` reads only what has arrived. They use
only the connection, which no other thread uses, so the loop can run without the GIL.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from psycopg import pq

from cdc.errors import LibpqUnusable

LIBPQ: Final = ("PQgetCopyData", "PQfreemem", "PQconsumeInput")
"""Names of the functions of libpq."""
LIBC: Final = ("memcpy", "poll", "usleep")
"""Names of the functions of the C library."""


class LibpqFunctions(NamedTuple):
    """Addresses of C functions, in the order in which the compiled loops take them."""

    get_copy_data: int
    """`int PQgetCopyData(PGconn *, char **, int async)`"""
    free: int
    """`void PQfreemem(void *)`"""
    copy: int
    """`void *memcpy(void *, const void *, size_t)`"""
    consume_input: int
    """`int PQconsumeInput(PGconn *)`"""
    poll: int
    """`int poll(struct pollfd *, nfds_t, int milliseconds)`"""
    rest: int
    """`int usleep(useconds_t)`"""


def load() -> LibpqFunctions:
    """Return the functions of the libpq that psycopg has loaded. Raises LibpqUnusable if they cannot be called."""
    path = _loaded_libpq()
    try:
        library, standard = ctypes.CDLL(path), ctypes.CDLL(None)
    except (OSError, TypeError) as exc:
        raise LibpqUnusable("the libpq that psycopg has loaded cannot be found") from exc
    return checked(library, standard, pq.version())


def checked(library: Any, standard: Any, version: int) -> LibpqFunctions:
    """Return the functions of two libraries, libpq and the C library.

    version: the version that psycopg reports. Raises LibpqUnusable for another version, for a missing function, and on
    a machine whose addresses do not have 64 bits.
    """
    needed = [(library, name) for name in ("PQlibVersion", *LIBPQ)] + [(standard, name) for name in LIBC]
    missing = [name for owner, name in needed if not hasattr(owner, name)]
    if missing:
        raise LibpqUnusable(f"libpq cannot be called directly: {', '.join(missing)} is missing")
    if library.PQlibVersion() != version:
        raise LibpqUnusable(
            f"libpq cannot be called directly: version {library.PQlibVersion()} was found, and psycopg uses {version}"
        )
    if ctypes.sizeof(ctypes.c_void_p) != np.dtype(np.int64).itemsize:
        raise LibpqUnusable("libpq cannot be called directly: addresses do not have 64 bits on this machine")
    return LibpqFunctions(
        get_copy_data=_address(library.PQgetCopyData),
        free=_address(library.PQfreemem),
        copy=_address(standard.memcpy),
        consume_input=_address(library.PQconsumeInput),
        poll=_address(standard.poll),
        rest=_address(standard.usleep),
    )


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _loaded_libpq() -> str | None:
    """Return the path of the libpq that psycopg loaded; None if the path cannot be found."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded = dict.fromkeys(
            line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "/libpq" in line and ".so" in line
        )
        paths = [path for path in loaded if Path(path).name.startswith("libpq")]
        bundled = [path for path in paths if "psycopg_binary" in path]
        if usable := (bundled if pq.__impl__ == "binary" else paths):
            return usable[0]
    if pq.__impl__ == "binary":
        folder = Path(sys.modules["psycopg"].__path__[0]).parent / "psycopg_binary.libs"
        return str(next(folder.glob("libpq-*"), "")) or None
    return None
