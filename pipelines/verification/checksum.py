"""Checksum: a multiset of rows as (count, sum, sum) per bucket of keys, in constant memory.

Two multisets with equal sums of two independent 64-bit hashes differ with a chance of about 2**-128
per bucket; the order of the rows does not matter, a duplicate does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit

BUCKETS: Final = 1 << 16
"""3 MB for both sides; one wrong row among 10 M makes 150 rows be compared one by one."""

_P1: Final = np.uint64(0x9E3779B185EBCA87)
_P2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_P3: Final = np.uint64(0x165667B19E3779F9)
_P4: Final = np.uint64(0xFF51AFD7ED558CCD)
_P5: Final = np.uint64(0xC4CEB9FE1A85EC53)
_NULL: Final = np.uint64(0xA0761D6478BD642F)
_U29: Final = np.uint64(29)
_U33: Final = np.uint64(33)
_U35: Final = np.uint64(35)
_U8: Final = np.uint64(8)
_SEEDS: Final = (np.uint64(0x2545F4914F6CDD1D), np.uint64(0x9FB21C651E98DF25))


@njit(cache=True, nogil=True)
def _finish(state: np.uint64) -> np.uint64:
    # murmur3's 64-bit finaliser: every input bit reaches every output bit
    state ^= state >> _U33
    state *= _P4
    state ^= state >> _U33
    state *= _P5
    return state ^ (state >> _U33)


@njit(cache=True, nogil=True)
def _mix_column(lane: np.ndarray, offsets: np.ndarray, content: np.ndarray, valid: np.ndarray) -> None:
    for row in range(lane.size):
        state = lane[row] * _P3 + _P2
        if not valid[row]:
            lane[row] = _finish(state ^ _NULL)
            continue
        start, stop = offsets[row], offsets[row + 1]
        word = np.uint64(0)
        filled = 0
        for at in range(start, stop):
            word = (word << _U8) | np.uint64(content[at])
            filled += 1
            if filled == 8:  # noqa: PLR2004
                state ^= word * _P1
                state = ((state << _U29) | (state >> _U35)) * _P2
                word = np.uint64(0)
                filled = 0
        state ^= word * _P1
        # the length keeps 'ab','c' apart from 'a','bc' and '' apart from NULL
        lane[row] = _finish(state * _P2 + np.uint64(stop - start) + np.uint64(1))


@njit(cache=True, nogil=True)
def _add(sums: np.ndarray, buckets: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
    for row in range(buckets.size):
        bucket = buckets[row]
        sums[0, bucket] += np.uint64(1)
        sums[1, bucket] += first[row]
        sums[2, bucket] += second[row]


def row_hashes(columns: Sequence[pa.Array], seed: int = 0) -> np.ndarray:
    """One 64-bit hash per row over string columns in their order; seed 0 or 1 picks the hash."""
    lane = np.full(len(columns[0]), _SEEDS[seed], np.uint64)
    for column in columns:
        whole = column.cast(pa.large_string())
        _, offset_buffer, content_buffer = whole.buffers()
        if not len(whole):
            break
        offsets = np.frombuffer(offset_buffer, np.int64)[whole.offset : whole.offset + len(whole) + 1]
        content = np.frombuffer(content_buffer or b"", np.uint8)
        _mix_column(lane, offsets, content, pc.is_valid(whole).to_numpy(zero_copy_only=False))
    return lane


def buckets_of(keys: Sequence[pa.Array]) -> np.ndarray:
    """The bucket of each row, by its key columns (all columns of a keyless table)."""
    return (row_hashes(keys) % np.uint64(BUCKETS)).astype(np.int64)


class Checksum:
    """The running checksum of one side of a comparison."""

    def __init__(self) -> None:
        self._sums = np.zeros((3, BUCKETS), np.uint64)

    def add(self, columns: Sequence[pa.Array], keys: Sequence[pa.Array]) -> None:
        """Take rows in: all their columns in a fixed order, and those of the key."""
        if len(columns[0]):
            _add(self._sums, buckets_of(keys), row_hashes(columns), row_hashes(columns, 1))

    @property
    def rows(self) -> int:
        """Rows taken in."""
        return int(self._sums[0].sum())

    @property
    def counts(self) -> np.ndarray:
        """Rows per bucket."""
        return self._sums[0]

    def differing(self, other: Checksum) -> np.ndarray:
        """The buckets where the two multisets are not equal, ascending."""
        return np.flatnonzero((self._sums != other._sums).any(axis=0))
