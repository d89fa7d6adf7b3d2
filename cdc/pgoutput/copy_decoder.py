"""CopyDecoder: decodes the text of COPY … TO STDOUT to log rows of operation `r` (read), without an object per row."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pyarrow as pa

from cdc.errors import MalformedFrame
from cdc.pgoutput import copy_kernel, kernel
from cdc.pgoutput.kernel_arrays import TupleLayout, pack_layouts
from cdc.pgoutput.row_buffers import Capacity, RowBuffers, new_state
from cdc.position import Position
from cdc.table import TableSchema

Lines: TypeAlias = bytes | memoryview
"""A chunk of the text that a COPY returns."""


class CopyDecoder:
    r"""Decoder of one COPY of the columns `schema.sent`, in that order: tab-separated lines, `\N` for NULL.

    Chunks may end anywhere. A chunk costs about 0.1 ms plus 0.1 µs per value, so large chunks are cheaper. All rows
    have the same position, xid and committed_at (microseconds UTC); ordinals increase from first_ordinal.
    """

    def __init__(
        self, schema: TableSchema, *, position: Position, xid: int, committed_at: int, first_ordinal: int
    ) -> None:
        self._layout = TupleLayout.of(schema)
        self._packed = pack_layouts([(self._layout, 0)])
        self._topics = pa.array([schema.topic], pa.string())
        self._state = new_state()
        self._state[kernel.POSITION] = position
        self._state[kernel.XID] = xid
        self._state[kernel.COMMITTED_AT] = committed_at
        self._state[kernel.ORDINAL] = first_ordinal
        self._tail: list[bytes] = []
        self.rows = 0
        """Number of rows returned so far."""

    @property
    def next_ordinal(self) -> int:
        """Ordinal of the next row."""
        return int(self._state[kernel.ORDINAL])

    def feed(self, chunk: Lines) -> pa.RecordBatch | None:
        """Return the rows of the lines that this chunk completes; None if it completes no line.

        Keeps no reference to the chunk. Raises MalformedFrame if a line does not match the schema or is not UTF-8.
        """
        if not self._tail and chunk[-1:] == b"\n":
            return self._rows(chunk)
        piece = bytes(chunk)
        cut = piece.rfind(b"\n") + 1
        if cut == 0:
            if piece:
                self._tail.append(piece)
            return None
        lines = b"".join((*self._tail, piece[:cut]))
        self._tail = [piece[cut:]] if cut < len(piece) else []
        return self._rows(lines)

    def finish(self) -> None:
        """Raise MalformedFrame if the COPY ended inside a line."""
        if self._tail:
            raise MalformedFrame(f"copy of {self._layout.topic!r} ended inside the line of row {self.rows}")

    def _rows(self, lines: Lines) -> pa.RecordBatch:
        self._state[kernel.CURSOR] = self._state[kernel.ROWS] = 0
        text = np.frombuffer(lines, np.uint8)
        text.flags.writeable = False  # numba would compile the kernel again for writable arrays
        count = int(copy_kernel.lines_in(text))
        # enough for any content of these lines, so that the buffers never grow; untouched memory costs nothing
        columns, keys, size = len(self._layout.ids), len(self._layout.key), len(lines)
        capacity = Capacity(count, (count * keys, 0, 0, count * columns), (size if keys else 0, 0, 0, size))
        buffers = RowBuffers(self._state, capacity)
        if not copy_kernel.walk_copy(text, self._state, buffers.rows, self._packed):
            row = self.rows + int(self._state[kernel.ROWS]) - 1
            raise MalformedFrame(
                f"copy of {self._layout.topic!r}: expected {columns} columns of UTF-8 text in the line of row {row}"
            )
        self.rows += int(self._state[kernel.ROWS])
        return buffers.take(self._topics)
