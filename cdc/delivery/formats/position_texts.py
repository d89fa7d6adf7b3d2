"""Positions as text, such as `16/B374D848`, for many positions at once."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa

from cdc.position import Position

_HALF: Final = 32
"""Bits of the number after the slash; the numbers before it are the same for 4 GiB of WAL."""
_DIGITS: Final = 8
"""Maximum number of its digits."""


def position_texts(positions: np.ndarray) -> pa.StringArray:
    """Return `str(Position(position))` of each position."""
    high, low = positions >> _HALF, positions & ((1 << _HALF) - 1)
    # almost always true of the positions in one part of a log, which are in order
    is_uniform = len(positions) > 0 and high.min() == high.max() and _digits(low.min()) == _digits(low.max())
    if not is_uniform:
        return pa.array([str(Position(position)) for position in positions.tolist()], pa.string())
    prefix = str(Position(int(high[0]) << _HALF)).removesuffix("0").encode()
    digits = _digits(low[0])
    text = np.empty((len(positions), len(prefix) + digits), np.uint8)
    text[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
    table = _four_digits()
    both = np.stack([table[low >> 16], table[low & 0xFFFF]], axis=1)
    text[:, len(prefix) :] = both.view(np.uint8).reshape(-1, _DIGITS)[:, _DIGITS - digits :]
    ends = np.arange(0, text.size + 1, text.shape[1], dtype=np.int32)
    return pa.StringArray.from_buffers(len(positions), pa.py_buffer(ends), pa.py_buffer(text))


def _digits(number: np.integer) -> int:
    return max(1, (int(number).bit_length() + 3) // 4)


@lru_cache(maxsize=1)
def _four_digits() -> np.ndarray:
    """Return the four hexadecimal digits of each number of 16 bits, as the four bytes of a word."""
    texts = b"".join(b"%04X" % number for number in range(1 << 16))
    return np.frombuffer(texts, np.uint32)
