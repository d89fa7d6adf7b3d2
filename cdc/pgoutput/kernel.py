"""The numba kernels: replication frames and COPY lines to the Arrow buffers of log rows.

All compiled functions stand in this one file, because numba's cache of a caller does not notice a
change in another file. A kernel never makes a Python object and never raises: it stops, says why,
and leaves the place where it stopped in `state`.
"""
# ruff: noqa: PLR, C901 - a numba kernel is one flat function of arrays

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numba import njit

# why a kernel stopped
DONE: Final = 0
#: The buffers have no room for the frame: grow them and call again.
GROW: Final = 1
#: Enough for one batch.
FULL: Final = 2
#: The frame is not a row or a transaction's end, or not well-formed: Python's turn.
OTHER: Final = 3
#: A transaction began and schema rows wait for it.
ANNOUNCE: Final = 4

# places in `state`
CURSOR: Final = 0
ROWS: Final = 1
OPEN: Final = 2
DROPPED: Final = 3
POSITION: Final = 4
XID: Final = 5
COMMITTED_AT: Final = 6
ORDINAL: Final = 7
COMPLETE: Final = 8
TRANSACTIONS: Final = 9
LAST: Final = 10
LAST_COMMITTED_AT: Final = 11
EPOCH: Final = 12
AFTER: Final = 13
MOVED: Final = 14
#: Children and bytes that the frame at the cursor may need in one column.
NEED_VALUES: Final = 15
NEED_BYTES: Final = 16
ANNOUNCING: Final = 17
STATE_SIZE: Final = 18

LSN_BITS: Final = 52
POSTGRES_EPOCH: Final = 946_684_800_000_000
LATEST: Final = 2**63 - 1 - POSTGRES_EPOCH
HEADER: Final = 25
VALUE_LIMIT: Final = 16 << 20
ROW_LIMIT: Final = 1 << 18
CHILD_LIMIT: Final = 1 << 22
#: Arrow's offsets are int32; a row may hold its old image twice.
OFFSET_LIMIT: Final = 2**31 - 1

# places in OPERATIONS
C, U, D, R, T, M, S, G = range(8)
OPERATIONS: Final = "cudrtmsg"

SENT: Final = 116  # t
NULL: Final = 110  # n
NOT_SENT: Final = 117  # u
KEY: Final = 75  # K
ROW: Final = 79  # O
NEW: Final = 78  # N


class Texts(NamedTuple):
    """One nested column (list or map of text) under construction."""

    ends: np.ndarray
    """int32, rows + 1: where each row's children end."""
    valid: np.ndarray
    """uint8 per row: 0 is null."""
    ids: np.ndarray
    """int32 per child: column id; the key of a map, unused in a list."""
    offsets: np.ndarray
    """int32, children + 1."""
    present: np.ndarray
    """uint8 per child: 0 is null."""
    text: np.ndarray
    """uint8, UTF-8."""
    used: np.ndarray
    """int64: children, bytes."""


class Rows(NamedTuple):
    """The log row's columns under construction; payload and address are Python's."""

    position: np.ndarray
    ordinal: np.ndarray
    xid: np.ndarray
    committed_at: np.ndarray
    relation: np.ndarray
    """int64; below 0 is null."""
    topic: np.ndarray
    """int32: place in the topics; below 0 is null."""
    op: np.ndarray
    """int8: place in OPERATIONS."""
    partial: np.ndarray
    """uint8."""
    key: Texts
    old_key: Texts
    before: Texts
    after: Texts


class Layouts(NamedTuple):
    """Every defined layout, sorted by OID; place i of the first six arrays is one relation."""

    oid: np.ndarray
    relation: np.ndarray
    topic: np.ndarray
    first: np.ndarray
    """int64, n + 1: its columns in `ids` and `is_key`."""
    key_first: np.ndarray
    """int64, n + 1: its key in `keys`."""
    ids: np.ndarray
    is_key: np.ndarray
    keys: np.ndarray
    """int64: wire places in key order."""


class Values(NamedTuple):
    """One tuple as found: kind, and where the text is in the frame buffer."""

    kind: np.ndarray
    at: np.ndarray
    size: np.ndarray


def kernel(function: Callable[..., Any]) -> Any:
    """Compile on first call, without the GIL; kept on disk where a writable place can be found.

    No kernel allocates, so reference counting is off: counting the arrays of every tuple that a
    kernel hands on was most of its time.
    """
    try:
        return njit(nogil=True, cache=True, _nrt=False)(function)
    except RuntimeError:  # neither NUMBA_CACHE_DIR, nor the package, nor the user's cache is writable
        return njit(nogil=True, _nrt=False)(function)


@kernel
def unsigned(buffer, at, width):  # type: ignore[no-untyped-def]
    """Big-endian, wraps at 8 bytes into int64."""
    value = np.int64(0)
    for i in range(at, at + width):
        value = (value << 8) | np.int64(buffer[i])
    return value


@kernel
def is_utf8(buffer, at, end):  # type: ignore[no-untyped-def]
    """RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF."""
    seen = np.uint8(0)
    for i in range(at, end):
        seen |= buffer[i]
    if seen < 0x80:
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
def read_tuple(buffer, at, end, width, values):  # type: ignore[no-untyped-def]
    """Note the places of a tuple's values; the offset behind it, or -1 if it is not one of this width."""
    if at + 2 > end or unsigned(buffer, at, 2) != width:
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
            size = unsigned(buffer, at, 4)
            at += 4
            if size > end - at or not is_utf8(buffer, at, at + size):
                return np.int64(-1)
            values.at[place] = at
            values.size[place] = size
            at += size
        elif kind != NULL and kind != NOT_SENT:
            return np.int64(-1)
    return np.int64(at)


@kernel
def put(texts, column, buffer, kind, at, size):  # type: ignore[no-untyped-def]
    """Append one child."""
    child, end = texts.used[0], texts.used[1]
    texts.ids[child] = column
    texts.present[child] = kind == SENT
    if kind == SENT:
        for i in range(size):
            texts.text[end + i] = buffer[at + i]
        end += size
    texts.offsets[child + 1] = end
    texts.used[0] = child + 1
    texts.used[1] = end


@kernel
def end_row(texts, row, valid):  # type: ignore[no-untyped-def]
    """The children so far are the row's."""
    texts.ends[row + 1] = texts.used[0]
    texts.valid[row] = valid


@kernel
def start_row(rows, state, op, relation, topic):  # type: ignore[no-untyped-def]
    """The plain columns of the next row; its place."""
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


@kernel
def put_key(texts, layouts, layout, buffer, values):  # type: ignore[no-untyped-def]
    """Append the key columns."""
    for i in range(layouts.key_first[layout], layouts.key_first[layout + 1]):
        place = layouts.keys[i]
        put(texts, np.int32(0), buffer, values.kind[place], values.at[place], values.size[place])


@kernel
def put_image(texts, layouts, layout, buffer, values, keys_only):  # type: ignore[no-untyped-def]
    """Append what was sent; whether all columns were."""
    first = layouts.first[layout]
    width = layouts.first[layout + 1] - first
    whole = True
    for place in range(width):
        kind = values.kind[place]
        if kind == NOT_SENT:
            whole = False
        elif not keys_only or layouts.is_key[first + place]:
            put(texts, layouts.ids[first + place], buffer, kind, values.at[place], values.size[place])
    return whole


@kernel
def append(rows, state, layouts, layout, op, buffer, old_kind, old, new, moved):  # type: ignore[no-untyped-def]
    """One row of a change."""
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


@kernel
def fill(layouts, layout, old_kind, old, new):  # type: ignore[no-untyped-def]
    """Take what the new tuple does not send from where the old one holds it."""
    first = layouts.first[layout]
    for place in range(layouts.first[layout + 1] - first):
        if new.kind[place] == NOT_SENT and (old_kind == ROW or layouts.is_key[first + place]):
            new.kind[place] = old.kind[place]
            new.at[place] = old.at[place]
            new.size[place] = old.size[place]


@kernel
def has_key(layouts, layout, values):  # type: ignore[no-untyped-def]
    """Whether every key column was sent."""
    for i in range(layouts.key_first[layout], layouts.key_first[layout + 1]):
        if values.kind[layouts.keys[i]] == NOT_SENT:
            return False
    return True


@kernel
def same_key(layouts, layout, buffer, old, new):  # type: ignore[no-untyped-def]
    """Whether the key's texts are equal."""
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


@kernel
def find(layouts, oid):  # type: ignore[no-untyped-def]
    """The layout's place, or -1."""
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


@kernel
def has_room(rows, state):  # type: ignore[no-untyped-def]
    """Whether two more rows fit, each with all that the frame can bring."""
    if state[ROWS] + 2 > len(rows.position):
        return False
    for texts in (rows.key, rows.old_key, rows.before, rows.after):
        if texts.used[0] + state[NEED_VALUES] > len(texts.present):
            return False
        if texts.used[1] + state[NEED_BYTES] > len(texts.text):
            return False
    return True


@kernel
def change(kind, buffer, at, end, rows, state, layouts, layout, old, new):  # type: ignore[no-untyped-def]
    """The rows of one I, U or D whose tuples start at `at`; False if it is not well-formed."""
    width = layouts.first[layout + 1] - layouts.first[layout]
    mark = buffer[at]
    old_kind = 0
    if (mark == KEY or mark == ROW) and kind != 73:
        old_kind = mark
        at = read_tuple(buffer, at + 1, end, width, old)
        if at < 0 or not has_key(layouts, layout, old):
            return False
        if kind == 68:
            if at != end:
                return False
            append(rows, state, layouts, layout, D, buffer, old_kind, old, new, False)
            return True
        if at >= end:
            return False
        mark = buffer[at]
    if mark != NEW or kind == 68:
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
    append(rows, state, layouts, layout, C if kind == 73 else U, buffer, old_kind, old, new, moved)
    return True


@kernel
def walk(buffer, offsets, state, rows, layouts, old, new):  # type: ignore[no-untyped-def]
    """Take frames from the cursor on, until the end or a frame that is not the kernel's."""
    while state[CURSOR] < len(offsets) - 1:
        if state[ROWS] >= ROW_LIMIT or rows.before.used[1] + rows.after.used[1] >= VALUE_LIMIT:
            return FULL
        if rows.before.used[0] + rows.after.used[0] >= CHILD_LIMIT:
            return FULL
        at, end = offsets[state[CURSOR]], offsets[state[CURSOR] + 1]
        if end - at <= HEADER or buffer[at] != 119:
            return OTHER
        at += HEADER
        kind = buffer[at]
        at += 1
        if kind == 73 or kind == 85 or kind == 68:  # I U D
            if state[OPEN] == 0:
                return OTHER
            if state[DROPPED] == 0:
                if at + 5 > end:
                    return OTHER
                layout = find(layouts, unsigned(buffer, at, 4))
                if layout < 0:
                    return OTHER
                if layouts.relation[layout] >= 0:
                    state[NEED_VALUES] = 2 * (layouts.first[layout + 1] - layouts.first[layout])
                    state[NEED_BYTES] = 2 * (end - at)
                    if state[NEED_BYTES] > OFFSET_LIMIT:
                        return OTHER
                    if state[ROWS] > 0 and rows.before.used[1] + state[NEED_BYTES] > OFFSET_LIMIT:
                        return FULL
                    if not has_room(rows, state):
                        return GROW
                    if not change(kind, buffer, at + 4, end, rows, state, layouts, layout, old, new):
                        return OTHER
        elif kind == 66:  # B
            if end - at != 20 or state[OPEN] != 0:
                return OTHER
            lsn = unsigned(buffer, at, 8)
            time = unsigned(buffer, at + 8, 8)
            if lsn < 0 or lsn >> LSN_BITS != 0 or time > LATEST:
                return OTHER
            state[OPEN] = 1
            state[POSITION] = state[EPOCH] << LSN_BITS | lsn
            state[COMMITTED_AT] = time + POSTGRES_EPOCH
            state[XID] = unsigned(buffer, at + 16, 4)
            state[ORDINAL] = 0
            state[DROPPED] = state[POSITION] <= state[AFTER]
            if state[DROPPED] == 0 and state[ANNOUNCING] != 0:
                state[CURSOR] += 1
                state[MOVED] = 1
                return ANNOUNCE
        elif kind == 67:  # C
            if end - at != 25 or state[OPEN] == 0 or unsigned(buffer, at + 17, 8) > LATEST:
                return OTHER
            if unsigned(buffer, at + 1, 8) != state[POSITION] & ((1 << LSN_BITS) - 1):
                return OTHER
            if state[DROPPED] == 0:
                state[COMPLETE] = state[ROWS]
                state[TRANSACTIONS] += 1
                state[LAST] = state[POSITION]
                state[LAST_COMMITTED_AT] = state[COMMITTED_AT]
            state[OPEN] = 0
        else:
            return OTHER
        state[CURSOR] += 1
        state[MOVED] = 1
    return DONE


@kernel
def walk_copy(buffer, state, rows, layouts):  # type: ignore[no-untyped-def]
    """Whole lines of COPY text to `r` rows; False at a line that does not fit the layout.

    Sizes are the caller's: no value is longer than its text in the line.
    """
    first = layouts.first[0]
    width = layouts.first[1] - first
    keyed = layouts.key_first[0] < layouts.key_first[1]
    after = rows.after
    at = state[CURSOR]
    while at < len(buffer):
        row = start_row(rows, state, R, layouts.relation[0], layouts.topic[0])
        base = after.used[0]
        place = 0
        while place < width:
            child, out = after.used[0], after.used[1]
            start = out
            present = True
            if buffer[at] == 92 and buffer[at + 1] == 78 and (buffer[at + 2] == 9 or buffer[at + 2] == 10):
                present = False
                at += 2
            else:
                while buffer[at] != 9 and buffer[at] != 10:
                    byte = buffer[at]
                    if byte == 92:
                        at += 1
                        byte = buffer[at]
                        if byte == 98:  # b
                            byte = np.uint8(8)
                        elif byte == 102:  # f
                            byte = np.uint8(12)
                        elif byte == 110:  # n
                            byte = np.uint8(10)
                        elif byte == 114:  # r
                            byte = np.uint8(13)
                        elif byte == 116:  # t
                            byte = np.uint8(9)
                        elif byte == 118:  # v
                            byte = np.uint8(11)
                    after.text[out] = byte
                    out += 1
                    at += 1
                    if at >= len(buffer):
                        return False
                if not is_utf8(after.text, start, out):
                    return False
            after.ids[child] = layouts.ids[first + place]
            after.present[child] = present
            after.offsets[child + 1] = out
            after.used[0] = child + 1
            after.used[1] = out
            place += 1
            if place < width:
                if buffer[at] != 9:
                    return False
                at += 1
        if buffer[at] != 10:
            return False
        at += 1
        end_row(after, row, True)
        for i in range(layouts.key_first[0], layouts.key_first[1]):
            child = base + layouts.keys[i]
            start = after.offsets[child]
            kind = np.uint8(SENT) if after.present[child] else np.uint8(NULL)
            put(rows.key, np.int32(0), after.text, kind, start, after.offsets[child + 1] - start)
        end_row(rows.key, row, keyed)
        end_row(rows.old_key, row, False)
        end_row(rows.before, row, False)
        state[CURSOR] = at
    return True
