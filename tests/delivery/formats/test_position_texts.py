"""Positions as text: the same as those of single positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.delivery.formats.position_texts import position_texts
from cdc.position import EPOCH_BITS, LSN_BITS, Position

POSITIONS = st.integers(0, (1 << EPOCH_BITS + LSN_BITS) - 1)


def expected(positions: list[int]) -> list[str]:
    return [str(Position(position)) for position in positions]


@given(st.lists(POSITIONS))
def test_any_positions(positions: list[int]) -> None:
    assert position_texts(np.array(positions, np.int64)).to_pylist() == expected(positions)


@given(POSITIONS, st.lists(st.integers(0, (1 << 20) - 1), min_size=1))
def test_positions_that_are_near_each_other(first: int, steps: list[int]) -> None:
    positions = [min(first + step, (1 << EPOCH_BITS + LSN_BITS) - 1) for step in steps]

    assert position_texts(np.array(positions, np.int64)).to_pylist() == expected(positions)


@pytest.mark.parametrize("low", [0, 0xF, 0x10, 0xFFFF, 0x10000, 0xFFFFFFFF])
@pytest.mark.parametrize("high", [0, 0x16 << 32, (1 << LSN_BITS) + (0x16 << 32)])
def test_each_number_of_digits(high: int, low: int) -> None:
    assert position_texts(np.array([high + low] * 3, np.int64)).to_pylist() == expected([high + low]) * 3
