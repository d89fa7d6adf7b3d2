"""Numba kernels that decode the lines of a COPY into the Arrow buffers of log rows; `kernel.py` explains kernels."""
# ruff: noqa: PLR0911, PLR1714, SIM109 - flat code on arrays and bytes

from __future__ import annotations

from typing import Any

import numpy as np

from cdc.pgoutput.kernel import CURSOR, HIGH_BITS, NULL, SENT, R, end_row, is_utf8, kernel, part, put, start_row
from cdc.pgoutput.kernel_arrays import Layouts, Rows, Texts
from cdc.pgoutput.word_ops import load_word, lowest_bit, store_word

BACKSLASH, LETTER_N, TAB, NEWLINE = b"\\N\t\n"

# eight bytes at once
EACH_BYTE = np.uint64(0x0101010101010101)
SEPARATOR_MASK, SEPARATORS = np.uint64(0xFC * EACH_BYTE), np.uint64(0x08 * EACH_BYTE)
BACKSLASHES = np.uint64(BACKSLASH * EACH_BYTE)
BYTE_BITS = np.uint64(0x38)


@part
def unescaped(letter: int) -> Any:
    """Return the byte for the letter of an escape sequence (PostgreSQL manual, COPY, File Formats)."""
    if letter == ord("n"):
        return np.uint8(10)
    if letter == ord("r"):
        return np.uint8(13)
    if letter == ord("t"):
        return np.uint8(9)
    if letter == ord("b"):
        return np.uint8(8)
    if letter == ord("f"):
        return np.uint8(12)
    if letter == ord("v"):
        return np.uint8(11)
    return letter


@part
def zero_bytes(word: Any) -> Any:
    """Return a word whose lowest set bit is the high bit of the lowest zero byte; 0 if no byte is zero."""
    return (word - EACH_BYTE) & ~word & HIGH_BITS


@part
def copy_words(buffer: np.ndarray, at: Any, text: np.ndarray, out: Any) -> Any:
    """Copy bytes in words of eight until the next tab, newline or backslash, or until fewer than eight bytes are left.

    Return the offsets in `buffer` and in `text` after the copied bytes, and the OR of all copied words. If all copied
    bytes are ASCII, the high bit of each byte of the OR is 0.
    """
    seen = np.uint64(0)
    while at + 8 <= len(buffer):
        word = load_word(buffer, at)
        store_word(text, out, word)
        # COPY escapes the bytes 8 to 11, so that one of them is a tab or a newline
        stops = zero_bytes((word & SEPARATOR_MASK) ^ SEPARATORS) | zero_bytes(word ^ BACKSLASHES)
        if stops != np.uint64(0):
            bits = lowest_bit(stops) & BYTE_BITS
            before = np.int64(bits >> np.uint64(3))
            return at + before, out + before, seen | (word & ((np.uint64(1) << bits) - np.uint64(1)))
        seen |= word
        at += 8
        out += 8
    return at, out, seen


@part
def copy_field(buffer: np.ndarray, at: Any, texts: Texts, column: int) -> Any:
    """Append the field that starts at `at`; return the offset of the tab or newline after it.

    Return -1 if no tab or newline follows, or if the field is not UTF-8. The text buffer of `texts` must have room for
    the rest of the input.
    """
    child, start = texts.used[0], texts.used[1]
    out = start
    present = True
    seen = np.uint64(0)
    if buffer[at] == BACKSLASH and buffer[at + 1] == LETTER_N and (buffer[at + 2] == TAB or buffer[at + 2] == NEWLINE):
        present = False
        at += 2
    else:
        while True:
            at, out, copied = copy_words(buffer, at, texts.text, out)
            seen |= copied
            if at >= len(buffer):
                return -1
            byte = buffer[at]
            if byte == TAB or byte == NEWLINE:
                break
            if byte == BACKSLASH:
                at += 1
                byte = unescaped(buffer[at])
            texts.text[out] = byte
            seen |= np.uint64(byte)
            at += 1
            out += 1
        if seen & HIGH_BITS and not is_utf8(texts.text, start, out):
            return -1
    texts.ids[child] = column
    texts.present[child] = present
    texts.offsets[child + 1] = out
    texts.used[0] = child + 1
    texts.used[1] = out
    return at


@kernel
def lines_in(text: np.ndarray) -> int:
    """Return the number of complete lines in a text."""
    count = 0
    for byte in text:
        count += byte == NEWLINE
    return count


@kernel
def walk_copy(buffer: np.ndarray, state: np.ndarray, rows: Rows, layouts: Layouts) -> bool:
    """Decode whole lines of COPY text to log rows; return False at a line that does not match the layout.

    The caller sizes the buffers by the text, because no value is longer than its text in the line.
    """
    width, keyed = layouts.first[1], layouts.key_first[1] > 0
    after = rows.after
    at = state[CURSOR]
    while at < len(buffer):
        row = start_row(rows, state, R, layouts.relation[0], layouts.topic[0])
        base = after.used[0]
        for place in range(width):
            at = copy_field(buffer, at, after, layouts.ids[place])
            if at < 0 or (place + 1 < width and buffer[at] != TAB):
                return False
            if place + 1 < width:
                at += 1
        if buffer[at] != NEWLINE:
            return False
        at += 1
        key, end = rows.key.used[0], rows.key.used[1]
        for i in range(layouts.key_first[1]):
            child = base + layouts.keys[i]
            start = after.offsets[child]
            kind = np.uint8(SENT) if after.present[child] else np.uint8(NULL)
            end = put(rows.key, key + i, end, np.int32(0), after.text, kind, start, after.offsets[child + 1] - start)
        rows.key.used[0], rows.key.used[1] = key + layouts.key_first[1], end
        end_row(rows.key, row, keyed)
        end_row(rows.old_key, row, False)
        end_row(rows.before, row, False)
        end_row(after, row, True)
    return True
