"""Memory of a process: how much it may use, and how it is allocated and freed."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa

LARGE_BLOCK: Final = 16 << 20
"""Size in bytes from which glibc maps a block separately and returns it to the system when it is freed.

Smaller blocks are on the heap, and are used again after they are freed. glibc's default is 128 KiB and grows to the
largest freed block, up to 32 MiB. The value is larger than most messages, because libpq allocates a block for each, and
than most columns of a commit: with 4 MiB a drain of wide rows had three times the page faults, and used a seventh more
CPU."""
THREADS_LARGE_BLOCK: Final = 4 << 20
"""LARGE_BLOCK in a process whose client libraries have many threads, so that it keeps less memory."""
THREADS_ARENAS: Final = 2
"""Maximum number of heaps in such a process; the default of glibc is eight for each core."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def usable_memory(group: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return the bytes of memory that this process may use: those of the machine, or of its container.

    group: the file with the limit of the container's control group.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(memory, int(group.read_text(encoding="ascii")))
    except (OSError, ValueError):  # there is no such group, or its limit is `max`
        return memory


def use_system_allocators(*, client_threads: bool = False) -> None:
    """Make Arrow use the system's allocator, and set glibc's thresholds where glibc is present.

    client_threads: whether client libraries have many threads.

    Arrow's own allocator, mimalloc, keeps memory for every thread that has read or written Parquet. With the system's
    allocator a reader needed 450 MiB at the peak of a transaction of 2 million rows instead of 521 MiB, and one sixth
    less CPU; a delivery to Kafka needed 331 MiB instead of 394 MiB. For a first copy the apply process needed the same
    memory, and 5 % less CPU.
    """
    large = THREADS_LARGE_BLOCK if client_threads else LARGE_BLOCK
    pa.set_memory_pool(pa.system_memory_pool())
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, large)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * large)
        if client_threads:
            libc.mallopt(_M_ARENA_MAX, THREADS_ARENAS)
