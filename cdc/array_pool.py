"""Pool of memory for large numpy arrays that are made, handed to other threads and dropped, over and over.

New memory is expensive: the kernel clears every page at its first use, other threads wait for the page tables, and a
virtual machine may first have to get the page from its host. Memory of the pool is cleared once.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from threading import RLock
from typing import Any, Final

import numpy as np

POOLED: Final = 128 << 10
"""Number of bytes from which an array gets memory from the pool."""
HUGE: Final = 8 << 20
"""Number of bytes from which a block has pages of 2 MiB, each of which is cleared at once."""


class ArrayPool:
    """Pool of memory blocks, each of which is used by one array at a time; thread-safe.

    A block is free again when nothing refers to the array, a slice of it, or an Arrow buffer that was made from it.
    """

    def __init__(self, spare: int) -> None:
        """spare: maximum bytes of free blocks that the pool keeps for later."""
        self._spare = spare
        self._free: tuple[np.ndarray, ...] = ()
        # reentrant, because garbage collection may give a block back while the same thread takes one
        self._lock = RLock()

    @property
    def spare_bytes(self) -> int:
        """Number of bytes of the free blocks."""
        return sum(block.nbytes for block in self._free)

    def array(self, count: int, dtype: Any = np.uint8) -> np.ndarray:
        """Return an array of `count` elements with arbitrary content."""
        nbytes = count * np.dtype(dtype).itemsize
        if nbytes < POOLED:
            return np.empty(count, dtype)
        block = self._take(nbytes)
        # made from a memoryview, so that slices refer to this array and not to the block
        array = np.frombuffer(block.data, dtype, count)
        weakref.finalize(array, self._give_back, block).atexit = False
        return array

    def _take(self, nbytes: int) -> np.ndarray:
        """Return a block of `nbytes` to twice as many bytes."""
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            free = self._free
            for place, block in enumerate(free):
                if block.nbytes == size:
                    self._free = free[:place] + free[place + 1 :]
                    return block
        # whole pages, so that a file can be written from it without the page cache
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= HUGE:
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)

    def _give_back(self, block: np.ndarray) -> None:
        """Keep a block for later, and forget the blocks that have been free for longest beyond the maximum."""
        with self._lock:
            self._free = (*self._free, block)
            while self.spare_bytes > self._spare:
                self._free = self._free[1:]
