"""Rows that wait for a commit: few in memory, many in a temporary file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import BinaryIO, Final, cast

import pyarrow as pa

from cdc.log.rows_at_position import STAGE_BYTES

_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="zstd")


class RowBuffer:
    """Keeps Arrow tables of one schema in the order in which they were added; one thread at a time uses it."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._tables: list[pa.Table] = []
        self._bytes = 0
        self._file: BinaryIO | None = None
        self._writer: pa.RecordBatchStreamWriter | None = None

    def add(self, rows: pa.Table) -> None:
        """Add rows after all earlier ones."""
        self._tables.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= STAGE_BYTES:
            self._write()

    def take(self) -> Iterator[pa.Table]:
        """Yield all rows in the order in which they were added; afterwards the buffer is empty."""
        if self._file is not None and self._writer is not None:
            self._writer.close()
            self._file.seek(0)
            with pa.ipc.open_stream(self._file) as written:
                for batch in written:
                    yield pa.Table.from_batches([batch])
        yield from self._tables
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        if self._file is not None:
            self._file.close()
        self._tables = []
        self._bytes = 0
        self._file = None
        self._writer = None

    def _write(self) -> None:
        if self._file is None:
            self._file = cast("BinaryIO", tempfile.TemporaryFile(prefix="cdc-view-"))  # noqa: SIM115 - `clear` closes it
            self._writer = pa.ipc.new_stream(self._file, self._schema, options=_COMPRESSED)
        assert self._writer is not None  # noqa: S101 - opened with the file
        for rows in self._tables:
            self._writer.write_table(rows)
        self._tables, self._bytes = [], 0
