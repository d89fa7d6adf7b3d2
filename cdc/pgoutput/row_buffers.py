"""RowBuffers: numpy buffers that the kernels fill with log rows, and that become Arrow columns without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa

from cdc.array_pool import ArrayPool
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.pgoutput.kernel import OPERATIONS, ROWS, STATE_SIZE, end_row, start_row
from cdc.pgoutput.kernel_arrays import Rows, Texts, Values

_NESTED: Final = ("key", "old_key", "before", "after")
_OPERATIONS: Final = pa.array(list(OPERATIONS), pa.string())
#: Minimum capacity of a batch: rows, and children and bytes per nested column; enough for a few small transactions.
_MINIMUM: Final = (64, 512, 8192)
#: Capacity of new buffers relative to the size of the last batch, so that batches of similar size do not grow.
_SLACK: Final = 1.25
_POOL: Final = ArrayPool(spare=64 << 20)
"""Memory of all row buffers of the process."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of row buffers: number of rows, and number of children and bytes per nested column."""

    rows: int = _MINIMUM[0]
    children: tuple[int, ...] = (_MINIMUM[1],) * len(_NESTED)
    nbytes: tuple[int, ...] = (_MINIMUM[2],) * len(_NESTED)

    def or_more(self, other: Capacity) -> Capacity:
        """Return the larger value of both capacities in each place."""
        children, nbytes = map(max, self.children, other.children), map(max, self.nbytes, other.nbytes)
        return Capacity(max(self.rows, other.rows), tuple(children), tuple(nbytes))


def new_state() -> np.ndarray:
    """Return the initial state of the kernels, an int64 array; `kernel.py` defines the meaning of its indices."""
    return np.zeros(STATE_SIZE, np.int64)


def new_values(width: int) -> Values:
    """Return empty arrays for one tuple of up to `width` values."""
    return Values(np.zeros(width, np.uint8), np.zeros(width, np.int64), np.zeros(width, np.int64))


class RowBuffers:
    """Buffers of log rows that are being filled; not usable after `take` has converted them to Arrow."""

    def __init__(self, state: np.ndarray, capacity: Capacity) -> None:
        self._state = state
        self._payloads: list[tuple[int, bytes]] = []
        self.rows = _rows(capacity)

    @classmethod
    def like(cls, state: np.ndarray, previous: Self) -> Self:
        """Return empty buffers with a little more capacity than the content of the previous buffers.

        Call this method before the row count in `state` is reset.
        """

        def room(used: int, least: int) -> int:
            return max(least, int(used * _SLACK))

        counts = [(int(texts.used[0]), int(texts.used[1])) for texts in previous.rows[8:]]
        children = tuple(room(count, _MINIMUM[1]) for count, _ in counts)
        nbytes = tuple(room(size, _MINIMUM[2]) for _, size in counts)
        return cls(state, Capacity(room(int(state[ROWS]), _MINIMUM[0]), children, nbytes))

    def has_room(self, need: Capacity) -> bool:
        """Return whether the buffers have room for this much more."""
        nested = zip(self.rows[8:], need.children, need.nbytes, strict=True)
        return int(self._state[ROWS]) + need.rows <= len(self.rows.position) and all(
            int(texts.used[0]) + children <= len(texts.present) and int(texts.used[1]) + nbytes <= len(texts.text)
            for texts, children, nbytes in nested
        )

    def grow(self, values: int, nbytes: int, columns: int) -> None:
        """Make room for two more rows, and for `values` more children and `nbytes` more bytes in some nested columns.

        columns: one bit for each nested column, as in NEED_COLUMNS of the kernel.
        """
        rows, used = self.rows, int(self._state[ROWS])
        capacity = _doubled(len(rows.position), used + 2)
        plain: list[Any] = [_resized(array, used, capacity) for array in rows[:8]]
        needs = [(values, nbytes) if columns >> place & 1 else (0, 0) for place in range(len(_NESTED))]
        nested: list[Any] = [_grown(texts, (used, capacity), need) for texts, need in zip(rows[8:], needs, strict=True)]
        self.rows = Rows(*plain, *nested)

    def control(self, operation: Operation, relation: int, topic: int, payload: bytes | None) -> None:
        """Append a row without row images; topic: index of the topic. A relation or topic below 0 becomes null.

        The method calls functions of the kernel without compiling them, because compiling here would delay the stream.
        """
        row = self._start_row(operation, relation, topic)
        for texts in self.rows[8:]:
            end_row.py_func(texts, row, False)
        if payload is not None:
            self._payloads.append((row, payload))

    def message(self, key: Sequence[str], content: bytes) -> None:
        """Append the row of a logical message: a row without relation, topic and row images. Compiles nothing."""
        row = self._start_row(Operation.MESSAGE, -1, -1)
        self._put_key([text.encode() for text in key])
        for texts in self.rows[8:]:
            end_row.py_func(texts, row, texts is self.rows.key)
        self._payloads.append((row, content))

    def take(self, topics: pa.Array) -> pa.RecordBatch:
        """Return all rows as one Arrow batch of LOG_SCHEMA, which then owns the memory of the buffers."""
        count, rows = int(self._state[ROWS]), self.rows
        columns = {
            "position": _plain(pa.int64(), rows.position, count),
            "ordinal": _plain(pa.int64(), rows.ordinal, count),
            "xid": _plain(pa.int64(), rows.xid, count),
            "committed_at": _plain(LOG_SCHEMA.field("committed_at").type, rows.committed_at, count),
            "relation": _plain(pa.int64(), rows.relation, count, rows.relation[:count] >= 0),
            "topic": topics.take(_plain(pa.int32(), rows.topic, count, rows.topic[:count] >= 0)),
            "op": _OPERATIONS.take(_plain(pa.int8(), rows.op, count)),
            "partial": pa.Array.from_buffers(pa.bool_(), count, [None, _bits(rows.partial[:count])]),
            "payload": self._payload_column(count),
            "address": pa.nulls(count, pa.string()),
            **{name: _nested(LOG_SCHEMA.field(name).type, getattr(rows, name), count) for name in _NESTED},
        }
        return pa.RecordBatch.from_arrays([columns[name] for name in LOG_SCHEMA.names], schema=LOG_SCHEMA)

    def _start_row(self, operation: Operation, relation: int, topic: int) -> int:
        if self._state[ROWS] + 1 >= len(self.rows.position):
            self.grow(0, 0, 0)
        return int(start_row.py_func(self.rows, self._state, OPERATIONS.index(operation), relation, topic))

    def _put_key(self, values: Sequence[bytes]) -> None:
        """Append the values to the column `key`, of which alone the buffers grow: a prefix can be as long as a row."""
        texts, text = self.rows.key, b"".join(values)
        first, start = texts.used.tolist()
        last, end = first + len(values), start + len(text)
        if last > len(texts.present) or end > len(texts.text):
            rows = len(self.rows.position)
            texts = _grown(texts, (rows, rows), (len(values), len(text)))
            self.rows = self.rows._replace(key=texts)
        texts.text[start:end] = np.frombuffer(text, np.uint8)
        texts.offsets[first + 1 : last + 1] = list(accumulate(map(len, values), initial=start))[1:]
        texts.ids[first:last], texts.present[first:last] = 0, True
        texts.used[:] = last, end

    def _payload_column(self, count: int) -> pa.Array:
        if not self._payloads:
            return pa.nulls(count, pa.binary())
        ends, valid = np.zeros(count + 1, np.int32), np.zeros(count, np.uint8)
        for row, payload in self._payloads:
            ends[row + 1], valid[row] = len(payload), 1
        np.cumsum(ends, out=ends)
        content = pa.py_buffer(b"".join(payload for _, payload in self._payloads))
        return pa.Array.from_buffers(pa.binary(), count, [_bits(valid), pa.py_buffer(ends), content])


def _rows(capacity: Capacity) -> Rows:
    count = capacity.rows
    numbers: list[Any] = [_POOL.array(count, np.int64) for _ in range(5)]
    nested: list[Any] = [_texts(count, *sizes) for sizes in zip(capacity.children, capacity.nbytes, strict=True)]
    numbers += [_POOL.array(count, kind) for kind in (np.int32, np.int8, np.uint8)]
    return Rows(*numbers, *nested)


def _texts(rows: int, children: int, nbytes: int) -> Texts:
    ends, offsets = _POOL.array(rows + 1, np.int32), _POOL.array(children + 1, np.int32)
    ends[0] = offsets[0] = 0
    return Texts(
        ends,
        _POOL.array(rows, np.uint8),
        _POOL.array(children, np.int32),
        offsets,
        _POOL.array(children, np.uint8),
        _POOL.array(nbytes, np.uint8),
        np.zeros(2, np.int64),
    )


def _doubled(capacity: int, need: int) -> int:
    return capacity if need <= capacity else max(need, 2 * capacity)


def _resized(array: np.ndarray, used: int, capacity: int) -> np.ndarray:
    if capacity <= len(array):
        return array
    larger = _POOL.array(capacity, array.dtype)
    larger[:used] = array[:used]
    return larger


def _grown(texts: Texts, rows: tuple[int, int], need: tuple[int, int]) -> Texts:
    children, nbytes = int(texts.used[0]), int(texts.used[1])
    capacity = _doubled(len(texts.present), children + need[0])
    return Texts(
        _resized(texts.ends, rows[0] + 1, rows[1] + 1),
        _resized(texts.valid, rows[0], rows[1]),
        _resized(texts.ids, children, capacity),
        _resized(texts.offsets, children + 1, capacity + 1),
        _resized(texts.present, children, capacity),
        _resized(texts.text, nbytes, _doubled(len(texts.text), nbytes + need[1])),
        texts.used,
    )


def _bits(mask: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


def _validity(mask: np.ndarray) -> pa.Buffer | None:
    return None if mask.all() else _bits(mask)


def _plain(kind: pa.DataType, array: np.ndarray, count: int, valid: np.ndarray | None = None) -> pa.Array:
    validity = None if valid is None else _validity(valid)
    return pa.Array.from_buffers(kind, count, [validity, pa.py_buffer(array[:count])])


def _nested(kind: pa.DataType, texts: Texts, count: int) -> pa.Array:
    children, nbytes = int(texts.used[0]), int(texts.used[1])
    text = [
        _validity(texts.present[:children]),
        *map(pa.py_buffer, (texts.offsets[: children + 1], texts.text[:nbytes])),
    ]
    values: Any = pa.Array.from_buffers(pa.string(), children, text)
    if pa.types.is_map(kind):
        ids = _plain(pa.int32(), texts.ids, children)
        entry = pa.struct([kind.key_field, kind.item_field])
        values = pa.Array.from_buffers(entry, children, [None], children=[ids, values])
    buffers = [_validity(texts.valid[:count]), pa.py_buffer(texts.ends[: count + 1])]
    return pa.Array.from_buffers(kind, count, buffers, children=[values])
