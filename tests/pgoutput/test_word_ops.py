"""Instructions on eight bytes, called from a compiled function."""

from __future__ import annotations

import numpy as np
from numba import njit

from cdc.pgoutput.word_ops import load_word, lowest_bit, store_word


@njit
def copy_word(source: np.ndarray, at: int, target: np.ndarray, to: int) -> int:
    word = load_word(source, at)
    store_word(target, to, word)
    return lowest_bit(word)


def test_a_word_is_copied_between_unaligned_offsets_and_has_its_lowest_bit():
    source, target = np.array([9, 0, 0, 0x50, 0, 0, 0, 0, 0xFF, 9], np.uint8), np.zeros(11, np.uint8)

    assert copy_word(source, 1, target, 3) == 2 * 8 + 4
    assert target.tolist() == [0, 0, 0, *source[1:9].tolist()]
