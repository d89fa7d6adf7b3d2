"""Numba kernels that decode replication frames into the Arrow buffers of log rows.

`word_ops.py` contains machine instructions that the kernels need and numba does not offer. A kernel creates no Python
objects and never raises. It returns why it stopped, and `state` contains the index of the frame at which it stopped.
"""
# ruff: noqa: PLR0911, PLR0913, PLR0917, PLR1714, PLR2004, C901, FBT001, SIM109 - flat code on arrays and bytes

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import njit

from cdc.cached_njit import cached_njit
from cdc.pgoutput.kernel_arrays import Layouts, Rows, Texts, Values
from cdc.pgoutput.word_ops import load_word, read_2_bytes, read_4_bytes, read_8_bytes, store_word

# why a kernel stopped
DONE: Final = 0
#: The buffers are too small for the frame: the caller grows them and calls the kernel again.
GROW: Final = 1
#: The buffers contain enough rows for one batch.
FULL: Final = 2
#: Python must handle the frame: it is no change, Begin or Commit, or it is malformed.
OTHER: Final = 3
#: A transaction began, and pending schema rows must be written into it.
ANNOUNCE: Final = 4

# indices of `state`; NEED_VALUES, NEED_BYTES: maximum children and bytes that the frame at the cursor adds to each of
# NEED_COLUMNS
CURSOR, ROWS, COMPLETE, TRANSACTIONS, LAST, LAST_COMMITTED_AT, MOVED, ANNOUNCING = range(8)
OPEN, DROPPED, POSITION, XID, COMMITTED_AT, ORDINAL, EPOCH, AFTER, NEED_VALUES, NEED_BYTES = range(8, 18)
NEED_COLUMNS: Final = 18
STATE_SIZE: Final = 19

# values of NEED_COLUMNS: one bit for each of key, old_key, before, after
OF_INSERT, OF_UPDATE, OF_DELETE = 0b1001, 0b1111, 0b0101

LSN_BITS: Final = 52
POSTGRES_EPOCH: Final = 946_684_800_000_000
#: The years 1 to 9999, the range that readers of the log support, in microseconds since 2000.
EARLIEST: Final = -62_135_596_800_000_000 - POSTGRES_EPOCH
LATEST: Final = 253_402_300_799_999_999 - POSTGRES_EPOCH
HEADER: Final = 25
VALUE_LIMIT: Final = 16 << 20
ROW_LIMIT: Final = 1 << 18
CHILD_LIMIT: Final = 1 << 22
#: Maximum bytes of text in a nested column, because Arrow's offsets are int32; a key change writes its old image twice.
OFFSET_LIMIT: Final = 2**31 - 1

# indices of OPERATIONS
C, U, D, R, T, M, S, G = range(8)
OPERATIONS: Final = "cudrtmsg"

SENT, NULL, NOT_SENT = b"tnu"
KEY, ROW, NEW = b"KON"
WAL, BEGIN, COMMIT, INSERT, UPDATE, DELETE = b"wBCIUD"
#: Bytes of a Begin message and of a Commit message without the letter.
BEGIN_SIZE, COMMIT_SIZE = 20, 25

HIGH_BITS: Final = np.uint64(0x8080808080808080)
"""The high bit of each byte of a word."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function on its first call, cache it on disk, and run it without the GIL.

    Kernels allocate no memory, so reference counting is off; it would take most of the time.
    """
    return cached_njit(function, _nrt=False)


def part(function: Callable[..., Any]) -> Any:
    """Have numba inline a function into each kernel that calls it, because passing tuples of arrays is slow."""
    return njit(nogil=True, forceinline=True, _nrt=False)(function)


@part
def has_high_bit(buffer: np.ndarray, at: Any, end: Any) -> bool:
    """Return True if a byte from `at` to `end` is not ASCII."""
    seen = np.uint64(0)
    while at + 8 <= end:
        seen |= load_word(buffer, at)
        at += 8
    if at + 8 <= len(buffer):
        # the bytes after `end` do not count
        seen |= load_word(buffer, at) & ((np.uint64(1) << np.uint64(8 * (end - at))) - np.uint64(1))
    else:
        for i in range(at, end):
            seen |= np.uint64(buffer[i])
    return seen & HIGH_BITS != np.uint64(0)


@part
def copy_bytes(source: np.ndarray, at: Any, size: Any, target: np.ndarray, to: Any) -> None:
    """Copy bytes in words of eight; up to seven bytes after the copied ones are overwritten if `target` has them."""
    in_words = size if at + size + 8 <= len(source) and to + size + 8 <= len(target) else size & ~7
    for place in range(0, in_words, 8):
        store_word(target, to + place, load_word(source, at + place))
    for i in range(in_words, size):
        target[to + i] = source[at + i]


@kernel
def is_utf8(buffer: np.ndarray, at: int, end: int) -> bool:
    """Return True if the bytes are UTF-8 (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF."""
    if not has_high_bit(buffer, at, end):
        return True
    while at < end:
        lead = np.int64(buffer[at])
        at += 1
        if lead < 0x80:
            continue
        if lead < 0xC2 or lead > 0xF4:
            return False
        rest = 1 if lead < 0xE0 else (2 if lead < 0xF0 else 3)
        if at + rest > end:
            return False
        low, high = 0x80, 0xBF
        if lead == 0xE0:
            low = 0xA0
        elif lead == 0xED:
            high = 0x9F
        elif lead == 0xF0:
            low = 0x90
        elif lead == 0xF4:
            high = 0x8F
        if buffer[at] < low or buffer[at] > high:
            return False
        for i in range(at + 1, at + rest):
            if buffer[i] < 0x80 or buffer[i] > 0xBF:
                return False
        at += rest
    return True


@kernel
def read_tuple(buffer: np.ndarray, at: int, end: int, width: int, values: Values) -> Any:
    """Find the values of a tuple; return the offset after it, or -1 if it is malformed or not `width` values wide."""
    if at + 2 > end or read_2_bytes(buffer, at) != width:
        return np.int64(-1)
    at += 2
    for place in range(width):
        if at >= end:
            return np.int64(-1)
        kind = buffer[at]
        at += 1
        values.kind[place] = kind
        if kind == SENT:
            if at + 4 > end:
                return np.int64(-1)
            size = read_4_bytes(buffer, at)
            at += 4
            if size > end - at or not is_utf8(buffer, at, at + size):
                return np.int64(-1)
            values.at[place] = at
            values.size[place] = size
            at += size
        elif kind != NULL and kind != NOT_SENT:
            return np.int64(-1)
    return np.int64(at)


@part
def put(texts: Texts, child: Any, end: Any, column: int, buffer: np.ndarray, kind: int, at: int, size: int) -> Any:
    """Store the text of one value as a child of a nested column, whose text ends at `end` so far; return the new end.

    The callers count the children and write `texts.used` once per tuple: numba would load it again for every value.
    """
    texts.ids[child] = column
    texts.present[child] = kind == SENT
    if kind == SENT:
        copy_bytes(buffer, at, size, texts.text, end)
        end += size
    texts.offsets[child + 1] = end
    return end


@part
def end_row(texts: Texts, row: int, valid: bool) -> None:
    """Complete a row of a nested column: the children appended since the previous row belong to it."""
    texts.ends[row + 1] = texts.used[0]
    texts.valid[row] = valid


@part
def start_row(rows: Rows, state: np.ndarray, op: int, relation: int, topic: int) -> int:
    """Write the columns of the next row that are not nested; return the row's index."""
    row = state[ROWS]
    rows.position[row] = state[POSITION]
    rows.ordinal[row] = state[ORDINAL]
    rows.xid[row] = state[XID]
    rows.committed_at[row] = state[COMMITTED_AT]
    rows.relation[row] = relation
    rows.topic[row] = topic
    rows.op[row] = op
    rows.partial[row] = False
    state[ROWS] = row + 1
    state[ORDINAL] += 1
    return row


@part
def put_key(texts: Texts, layouts: Layouts, layout: int, buffer: np.ndarray, values: Values) -> None:
    """Append the values of the key columns to a nested column."""
    child, end = texts.used[0], texts.used[1]
    for i in range(layouts.key_first[layout], layouts.key_first[layout + 1]):
        place = layouts.keys[i]
        end = put(texts, child, end, np.int32(0), buffer, values.kind[place], values.at[place], values.size[place])
        child += 1
    texts.used[0], texts.used[1] = child, end


@part
def put_image(texts: Texts, layouts: Layouts, layout: int, buffer: np.ndarray, values: Values, keys_only: bool) -> bool:
    """Append the sent values of a tuple as a row image; return True if all columns were sent."""
    first = layouts.first[layout]
    width = layouts.first[layout + 1] - first
    whole = True
    child, end = texts.used[0], texts.used[1]
    for place in range(width):
        kind = values.kind[place]
        if kind == NOT_SENT:
            whole = False
        elif not keys_only or layouts.is_key[first + place]:
            column = layouts.ids[first + place]
            end = put(texts, child, end, column, buffer, kind, values.at[place], values.size[place])
            child += 1
    texts.used[0], texts.used[1] = child, end
    return whole


@part
def append(
    rows: Rows,
    state: np.ndarray,
    layouts: Layouts,
    layout: int,
    op: int,
    buffer: np.ndarray,
    old_kind: int,
    old: Values,
    new: Values,
    moved: bool,
) -> None:
    """Append one log row of a change, with key, old key and row images; moved: True if the change changed the key."""
    row = start_row(rows, state, op, layouts.relation[layout], layouts.topic[layout])
    keyed = layouts.key_first[layout] < layouts.key_first[layout + 1]
    if op == D:
        put_key(rows.key, layouts, layout, buffer, old)
    else:
        put_key(rows.key, layouts, layout, buffer, new)
    end_row(rows.key, row, keyed)
    if moved:
        put_key(rows.old_key, layouts, layout, buffer, old)
    end_row(rows.old_key, row, moved)
    if old_kind != 0:
        put_image(rows.before, layouts, layout, buffer, old, old_kind == KEY)
    end_row(rows.before, row, old_kind != 0)
    if op != D:
        rows.partial[row] = not put_image(rows.after, layouts, layout, buffer, new, False)
    end_row(rows.after, row, op != D)


@part
def fill(layouts: Layouts, layout: int, old_kind: int, old: Values, new: Values) -> None:
    """Fill in the unsent values of the new tuple with the values of the old tuple, if the old tuple contains them."""
    first = layouts.first[layout]
    for place in range(layouts.first[layout + 1] - first):
        if new.kind[place] == NOT_SENT and (old_kind == ROW or layouts.is_key[first + place]):
            new.kind[place] = old.kind[place]
            new.at[place] = old.at[place]
            new.size[place] = old.size[place]


@part
def has_key(layouts: Layouts, layout: int, values: Values) -> bool:
    """Return True if the tuple contains every key column."""
    for i in range(layouts.key_first[layout], layouts.key_first[layout + 1]):
        if values.kind[layouts.keys[i]] == NOT_SENT:
            return False
    return True


@part
def same_key(layouts: Layouts, layout: int, buffer: np.ndarray, old: Values, new: Values) -> bool:
    """Return True if the old and the new tuple have equal texts in all key columns."""
    for i in range(layouts.key_first[layout], layouts.key_first[layout + 1]):
        place = layouts.keys[i]
        if old.kind[place] != new.kind[place]:
            return False
        if old.kind[place] != SENT or old.at[place] == new.at[place]:
            continue
        if old.size[place] != new.size[place]:
            return False
        for k in range(old.size[place]):
            if buffer[old.at[place] + k] != buffer[new.at[place] + k]:
                return False
    return True


@part
def find(layouts: Layouts, oid: int) -> int:
    """Return the index of the OID's layout; -1 if there is none."""
    low, high = 0, len(layouts.oid)
    while low < high:
        middle = (low + high) >> 1
        if layouts.oid[middle] < oid:
            low = middle + 1
        else:
            high = middle
    if low < len(layouts.oid) and layouts.oid[low] == oid:
        return low
    return -1


@part
def has_room(rows: Rows, state: np.ndarray) -> bool:
    """Return True if the buffers have room for two more rows, the most that the current frame can yield."""
    if state[ROWS] + 2 > len(rows.position):
        return False
    columns = state[NEED_COLUMNS]
    for texts in (rows.key, rows.old_key, rows.before, rows.after):
        if columns & 1:
            if texts.used[0] + state[NEED_VALUES] > len(texts.present):
                return False
            if texts.used[1] + state[NEED_BYTES] > len(texts.text):
                return False
        columns >>= 1
    return True


@part
def change(
    kind: int,
    buffer: np.ndarray,
    at: int,
    end: int,
    rows: Rows,
    state: np.ndarray,
    layouts: Layouts,
    layout: int,
    old: Values,
    new: Values,
) -> bool:
    """Append the rows of one I, U or D message with tuples from `at` on; return False if the message is malformed."""
    width = layouts.first[layout + 1] - layouts.first[layout]
    mark = buffer[at]
    old_kind = 0
    if (mark == KEY or mark == ROW) and kind != INSERT:
        old_kind = mark
        at = read_tuple(buffer, at + 1, end, width, old)
        if at < 0 or not has_key(layouts, layout, old):
            return False
        if kind == DELETE:
            if at != end:
                return False
            append(rows, state, layouts, layout, D, buffer, old_kind, old, new, False)
            return True
        if at >= end:
            return False
        mark = buffer[at]
    if mark != NEW or kind == DELETE:
        return False
    if read_tuple(buffer, at + 1, end, width, new) != end:
        return False
    if old_kind != 0:
        fill(layouts, layout, old_kind, old, new)
    if not has_key(layouts, layout, new):
        return False
    moved = old_kind != 0 and not same_key(layouts, layout, buffer, old, new)
    if moved:
        append(rows, state, layouts, layout, D, buffer, old_kind, old, new, False)
    append(rows, state, layouts, layout, C if kind == INSERT else U, buffer, old_kind, old, new, moved)
    return True


@part
def take_begin(buffer: np.ndarray, at: int, end: int, state: np.ndarray) -> bool:
    """Open a transaction; return False if the message is malformed or another transaction is open."""
    if end - at != BEGIN_SIZE or state[OPEN] != 0:
        return False
    lsn, time = read_8_bytes(buffer, at), read_8_bytes(buffer, at + 8)
    if lsn < 0 or lsn >> LSN_BITS != 0 or time < EARLIEST or time > LATEST:
        return False
    state[OPEN] = 1
    state[POSITION] = state[EPOCH] << LSN_BITS | lsn
    state[COMMITTED_AT] = time + POSTGRES_EPOCH
    state[XID] = read_4_bytes(buffer, at + 16)
    state[ORDINAL] = 0
    state[DROPPED] = state[POSITION] <= state[AFTER]
    return True


@part
def take_commit(buffer: np.ndarray, at: int, end: int, state: np.ndarray) -> bool:
    """Close the transaction; return False if the message is malformed or belongs to another transaction."""
    if end - at != COMMIT_SIZE or state[OPEN] == 0:
        return False
    time = read_8_bytes(buffer, at + 17)
    if time < EARLIEST or time > LATEST:
        return False
    if read_8_bytes(buffer, at + 1) != state[POSITION] & ((1 << LSN_BITS) - 1):
        return False
    if state[DROPPED] == 0:
        state[COMPLETE] = state[ROWS]
        state[TRANSACTIONS] += 1
        state[LAST] = state[POSITION]
        state[LAST_COMMITTED_AT] = state[COMMITTED_AT]
    state[OPEN] = 0
    return True


@part
def take_change(
    kind: int,
    buffer: np.ndarray,
    at: int,
    end: int,
    state: np.ndarray,
    rows: Rows,
    layouts: Layouts,
    old: Values,
    new: Values,
) -> int:
    """Append the rows of one I, U or D message if its relation is captured; return DONE or why decoding stops."""
    if state[OPEN] == 0:
        return OTHER
    if state[DROPPED] != 0:
        return DONE
    if at + 5 > end:
        return OTHER
    layout = find(layouts, read_4_bytes(buffer, at))
    if layout < 0:
        return OTHER
    if layouts.relation[layout] < 0:
        return DONE
    state[NEED_COLUMNS] = OF_INSERT if kind == INSERT else OF_UPDATE if kind == UPDATE else OF_DELETE
    # an update of the key is two rows, and each has the old image
    images = 2 if kind == UPDATE else 1
    state[NEED_VALUES] = images * (layouts.first[layout + 1] - layouts.first[layout])
    state[NEED_BYTES] = images * (end - at)
    if state[NEED_BYTES] > OFFSET_LIMIT:
        return OTHER
    if state[ROWS] > 0 and rows.before.used[1] + state[NEED_BYTES] > OFFSET_LIMIT:
        return FULL
    if not has_room(rows, state):
        return GROW
    return DONE if change(kind, buffer, at + 4, end, rows, state, layouts, layout, old, new) else OTHER


@part
def is_full(rows: Rows, state: np.ndarray) -> bool:
    """Return True if the buffers contain enough rows for one batch."""
    children = rows.before.used[0] + rows.after.used[0]
    nbytes = rows.before.used[1] + rows.after.used[1]
    return state[ROWS] >= ROW_LIMIT or nbytes >= VALUE_LIMIT or children >= CHILD_LIMIT


@kernel
def walk(
    buffer: np.ndarray,
    offsets: np.ndarray,
    state: np.ndarray,
    rows: Rows,
    layouts: Layouts,
    old: Values,
    new: Values,
) -> int:
    """Decode frames, from the cursor in `state` to the end or until Python must act; return DONE or why it stopped."""
    while state[CURSOR] < len(offsets) - 1:
        if is_full(rows, state):
            return FULL
        at, end = offsets[state[CURSOR]], offsets[state[CURSOR] + 1]
        if end - at <= HEADER or buffer[at] != WAL:
            return OTHER
        kind = buffer[at + HEADER]
        at += HEADER + 1
        if kind == INSERT or kind == UPDATE or kind == DELETE:
            stop = take_change(kind, buffer, at, end, state, rows, layouts, old, new)
            if stop != DONE:
                return stop
        elif kind == BEGIN:
            if not take_begin(buffer, at, end, state):
                return OTHER
        elif kind != COMMIT or not take_commit(buffer, at, end, state):
            return OTHER
        state[CURSOR] += 1
        state[MOVED] = 1
        if kind == BEGIN and state[DROPPED] == 0 and state[ANNOUNCING] != 0:
            return ANNOUNCE
    return DONE
