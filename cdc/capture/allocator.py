"""Memory allocator settings: they return freed blocks to the operating system, so that the process stays small."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Final

import pyarrow as pa

LARGE: Final = 1 << 20
"""Bytes from which glibc maps a block separately and unmaps it when it is freed. The default is 128 KiB and grows
to the largest block freed, up to 32 MiB. Such blocks then lie on the heap, where a small block above them prevents
their return. Reusing smaller blocks is cheaper than mapping them again."""
_M_MMAP_THRESHOLD: Final = -3


def use_system_allocators() -> None:
    """Make Arrow use the system's allocator, and set glibc's mmap threshold where glibc is present.

    Arrow's mimalloc keeps memory of every thread that has written Parquet. With this setting a transaction of 2 million
    rows peaked at 450 MiB instead of 521, with one sixth less CPU.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE)
