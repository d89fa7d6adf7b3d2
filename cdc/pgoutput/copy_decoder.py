"""CopyDecoder: decodes the text of COPY … TO STDOUT to log rows of operation `r` (read), without an object per row.

An Arrow batch of log rows takes about 0.5 ms, more than the rows of a small table. `CopiedRows` therefore collects the
rows of many tables in one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from cdc.errors import MalformedFrame
from cdc.log_row import Operation, RowOrder
from cdc.pgoutput import copy_kernel, kernel
from cdc.pgoutput.kernel_arrays import Layouts, TupleLayout, pack_layouts
from cdc.pgoutput.row_buffers import Capacity, RowBuffers, new_state
from cdc.position import Position
from cdc.table import TableSchema

Lines: TypeAlias = bytes | memoryview
"""A chunk of the text that a COPY returns."""
SHARED: Final = Capacity(1 << 14, (1 << 16, 0, 0, 1 << 18), (1 << 21, 0, 0, 1 << 23))
"""Minimum capacity of a batch for many tables; memory costs nothing before it is used."""
_NOTHING: Final = Capacity(0, (0,) * 4, (0,) * 4)


class CopiedRows:
    """Collects log rows of one position, from the COPYs of many tables, and control rows; `write` gets the batches."""

    def __init__(self, order: RowOrder, write: Callable[[pa.RecordBatch], None], least: Capacity = SHARED) -> None:
        """order: place of the first row; ordinals increase from there. least: minimum capacity of a batch."""
        self._write, self._least = write, least
        self._state = new_state()
        self._state[kernel.POSITION] = order.position
        self._state[kernel.XID] = order.xid
        self._state[kernel.COMMITTED_AT] = order.committed_at
        self._state[kernel.ORDINAL] = order.ordinal
        self._topics: dict[str, int] = {}
        self._buffers: RowBuffers | None = None

    @property
    def next_ordinal(self) -> int:
        """Ordinal of the next row."""
        return int(self._state[kernel.ORDINAL])

    def control(self, operation: Operation, relation: int, topic: str, payload: bytes) -> None:
        """Add a row without row images: an `s` or `g` row of a relation."""
        self._with_room(_NOTHING).control(operation, relation, self.number_of(topic), payload)

    def number_of(self, topic: str) -> int:
        """Return the number of a topic, as it is in `pack_layouts`."""
        return self._topics.setdefault(topic, len(self._topics))

    def decode(self, text: np.ndarray, need: Capacity, layouts: Layouts) -> tuple[int, bool]:
        """Add the rows of whole lines; return their number, and False if the last one does not match the layout.

        text: the bytes of the lines, read-only. need: enough capacity for any content of these lines.
        """
        buffers, before = self._with_room(need), int(self._state[kernel.ROWS])
        self._state[kernel.CURSOR] = 0
        matches = copy_kernel.walk_copy(text, self._state, buffers.rows, layouts)
        return int(self._state[kernel.ROWS]) - before, bool(matches)

    def flush(self) -> None:
        """Pass the collected rows to `write`."""
        if self._buffers is not None:
            self._write(self._buffers.take(pa.array(list(self._topics), pa.string())))
            self._buffers = None

    def _with_room(self, need: Capacity) -> RowBuffers:
        if self._buffers is not None and not self._buffers.has_room(need):
            self.flush()
        if self._buffers is None:
            self._state[kernel.ROWS] = 0
            self._buffers = RowBuffers(self._state, self._least.or_more(need))
        return self._buffers


class CopiedTable:
    r"""Decoder of one COPY of the columns `schema.sent`, in that order: tab-separated lines, `\N` for NULL.

    Chunks may end anywhere. A chunk costs about 20 µs plus 0.1 µs per value, so large chunks are cheaper.
    """

    def __init__(self, schema: TableSchema, into: CopiedRows) -> None:
        self._layout, self._into = TupleLayout.of(schema), into
        self._packed = pack_layouts([(self._layout, into.number_of(schema.topic))])
        self._tail: list[bytes] = []
        self.rows = 0
        """Number of rows decoded so far."""

    def feed(self, chunk: Lines) -> int:
        """Decode the lines that this chunk completes; return their number.

        Keeps no reference to the chunk. Raises MalformedFrame if a line does not match the schema or is not UTF-8.
        """
        if not self._tail and chunk[-1:] == b"\n":
            return self._decode(chunk)
        piece = bytes(chunk)
        cut = piece.rfind(b"\n") + 1
        if cut == 0:
            if piece:
                self._tail.append(piece)
            return 0
        lines = b"".join((*self._tail, piece[:cut]))
        self._tail = [piece[cut:]] if cut < len(piece) else []
        return self._decode(lines)

    def finish(self) -> None:
        """Raise MalformedFrame if the COPY ended inside a line."""
        if self._tail:
            raise MalformedFrame(f"copy of {self._layout.topic!r} ended inside the line of row {self.rows}")

    def _decode(self, lines: Lines) -> int:
        text = np.frombuffer(lines, np.uint8)
        text.flags.writeable = False  # numba would compile the kernel again for writable arrays
        count = int(copy_kernel.lines_in(text))
        columns, keys, size = len(self._layout.ids), len(self._layout.key), len(lines)
        need = Capacity(count, (count * keys, 0, 0, count * columns), (size if keys else 0, 0, 0, size))
        rows, matches = self._into.decode(text, need, self._packed)
        self.rows += rows
        if not matches:
            raise MalformedFrame(
                f"copy of {self._layout.topic!r}: expected {columns} columns of UTF-8 text in the line of row "
                f"{self.rows - 1}"
            )
        return rows


class CopyDecoder:
    """Decoder of one COPY whose rows are needed at once: each chunk becomes a batch of its own."""

    def __init__(
        self, schema: TableSchema, *, position: Position, xid: int, committed_at: int, first_ordinal: int
    ) -> None:
        """position, xid, committed_at: of all rows (microseconds UTC); ordinals increase from first_ordinal."""
        self._batches: list[pa.RecordBatch] = []
        order = RowOrder(int(position), first_ordinal, xid, committed_at)
        self._rows = CopiedRows(order, self._batches.append, _NOTHING)
        self._table = CopiedTable(schema, self._rows)

    @property
    def rows(self) -> int:
        """Number of rows returned so far."""
        return self._table.rows

    @property
    def next_ordinal(self) -> int:
        """Ordinal of the next row."""
        return self._rows.next_ordinal

    def feed(self, chunk: Lines) -> pa.RecordBatch | None:
        """Return the rows of the lines that this chunk completes; None if it completes no line. Raises as CopiedTable.

        Keeps no reference to the chunk.
        """
        self._table.feed(chunk)
        self._rows.flush()
        return self._batches.pop() if self._batches else None

    def finish(self) -> None:
        """Raise MalformedFrame if the COPY ended inside a line."""
        self._table.finish()
