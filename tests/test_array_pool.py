"""ArrayPool: memory is used again when nothing refers to it, and never before."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cdc.array_pool import HUGE, POOLED, ArrayPool

LARGE = 8 * POOLED


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_an_array_has_the_requested_size_and_type(dtype: Any) -> None:
    for count in (0, 1, POOLED, LARGE + 1):
        array = ArrayPool(LARGE).array(count, dtype)

        assert (array.size, array.dtype, array.flags.writeable) == (count, dtype, True)


def test_the_memory_of_a_dropped_array_is_used_again() -> None:
    pool = ArrayPool(4 * LARGE)
    array = pool.array(LARGE)
    first = address(array)
    del array

    assert address(pool.array(LARGE - 1)) == first


@pytest.mark.parametrize(
    "derive",
    [
        lambda array: array[1:],
        lambda array: array[5:].view(),
        lambda array: pa.py_buffer(array[:9]),
        lambda array: pa.Array.from_buffers(pa.uint8(), 8, [None, pa.py_buffer(array[:9])]),
    ],
)
def test_memory_stays_in_use_while_anything_refers_to_it(derive: Callable[[np.ndarray], Any]) -> None:
    pool = ArrayPool(4 * LARGE)
    array = pool.array(LARGE)
    first, derived = address(array), derive(array)
    del array

    other = pool.array(LARGE)
    assert address(other) != first
    assert pool.spare_bytes == 0
    del derived
    assert pool.spare_bytes == LARGE
    assert address(pool.array(LARGE)) == first


def test_small_arrays_do_not_come_from_the_pool() -> None:
    pool = ArrayPool(LARGE)
    array = pool.array(POOLED - 1)
    del array

    assert pool.spare_bytes == 0


def test_no_more_than_the_spare_bytes_are_kept() -> None:
    pool = ArrayPool(2 * LARGE)
    arrays = [pool.array(LARGE) for _ in range(5)]
    arrays.clear()

    assert pool.spare_bytes == 2 * LARGE


def test_the_blocks_that_were_free_for_longest_are_forgotten() -> None:
    pool = ArrayPool(2 * LARGE)
    for count in (LARGE, LARGE, 2 * LARGE):
        pool.array(count)

    assert pool.spare_bytes == 2 * LARGE
    pool.array(4 * LARGE)
    assert pool.spare_bytes == 0


def test_memory_of_the_pool_begins_with_a_page() -> None:
    assert all(address(ArrayPool(LARGE).array(count)) % mmap.PAGESIZE == 0 for count in (POOLED, LARGE + 1, HUGE))
