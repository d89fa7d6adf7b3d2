"""Rows that wait for a commit come back in their order, whether they were few or many."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from cdc.log.rows_at_position import STAGE_BYTES
from pipelines.views.row_buffer import RowBuffer

SCHEMA = pa.schema([("number", pa.int64())])
MANY = STAGE_BYTES // 8 // 2
"""Numbers with half of the bytes that stay in memory."""


def numbers(first: int, count: int) -> pa.Table:
    return pa.table([pa.array(np.arange(first, first + count))], schema=SCHEMA)


def taken(buffer: RowBuffer) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *(rows["number"].to_numpy() for rows in buffer.take())])


@pytest.mark.parametrize(("parts", "count"), [(3, 2), (5, MANY), (0, 0)])
def test_rows_come_back_in_their_order(parts: int, count: int) -> None:
    buffer = RowBuffer(SCHEMA)
    for _ in range(2):  # an emptied buffer takes rows again
        for part in range(parts):
            buffer.add(numbers(part * count, count))
            assert buffer._bytes < STAGE_BYTES
        assert np.array_equal(taken(buffer), np.arange(parts * count))
        assert not taken(buffer).size


def test_rows_that_were_forgotten_do_not_come_back() -> None:
    buffer = RowBuffer(SCHEMA)
    for part in range(3):
        buffer.add(numbers(part, MANY))
    buffer.clear()
    buffer.add(numbers(7, 1))
    assert taken(buffer).tolist() == [7]
