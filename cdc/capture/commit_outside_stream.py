"""Snapshot commit: one commit of rows that do not come from the stream; all these rows have the same position.

An epoch begins with a snapshot commit, which contains the schema of every table and the rows of small tables. The
command `cdc slots recover --skip-to` makes a snapshot commit that marks tables for a resync. Whenever the collected
rows exceed STAGE_BYTES, they are written to data files. The commit makes all these files visible at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa

from cdc.failpoint import hit
from cdc.log.disk_format import CommitInfo, CommitSource
from cdc.log.writer import LogWriter, StagedFile
from cdc.log_row import LOG_SCHEMA, Operation, RowOrder, control_row
from cdc.pgoutput.copy_decoder import CopyDecoder, Lines
from cdc.position import Position
from cdc.table import TableSchema

STAGE_BYTES: Final = 64 * 1024 * 1024
"""Size in bytes from which the collected rows are written from memory to data files."""


class SnapshotCommit:
    """One commit outside the stream: collects rows of tables, then commits all these rows at one position."""

    def __init__(
        self, writer: LogWriter, position: Position, count: Callable[[str, int], None] = lambda _topic, _rows: None
    ) -> None:
        """count: called after each batch of table rows, with the topic of the table and the number of rows."""
        self.position = position
        self._writer, self._count = writer, count
        self._committed_at = time.time_ns() // 1000
        self._ordinal = 0
        self._rows = 0
        self._files: list[StagedFile] = []
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._ended: list[TableSchema] = []
        self.tables = self.table_rows = 0
        """Number of copied tables, and number of their rows, without `s` and `g` rows."""

    def table(self, schema: TableSchema, chunks: Iterator[Lines]) -> None:
        """Add one table with its rows: first the table's `s` row, then its rows from the chunks of a COPY."""
        self._add(self._control(schema, Operation.SCHEMA, schema.to_json()))
        decoder = CopyDecoder(
            schema, position=self.position, xid=0, committed_at=self._committed_at, first_ordinal=self._ordinal
        )
        for chunk in chunks:
            batch = decoder.feed(chunk)
            if batch is not None:
                self._add(batch)
                self.table_rows += batch.num_rows
                self._count(schema.topic, batch.num_rows)
        decoder.finish()
        self.tables += 1
        self._ended.append(schema)

    def mark(self, schema: TableSchema, *, ended: bool = False) -> None:
        """Add the `s` row of a table, but no table rows; if `ended`, targets delete the table's earlier rows."""
        self._add(self._control(schema, Operation.SCHEMA, schema.to_json()))
        if ended:
            self._ended.append(schema)

    def commit(self, lineage: CommitSource) -> None:
        """Add a `g` row for every table that was copied, or marked with `ended`; then commit all rows."""
        for schema in self._ended:
            self._add(self._control(schema, Operation.GENERATION, str(int(self.position)).encode()))
        self._stage()
        hit("after_copy_staged")
        info = CommitInfo(
            last=self.position,
            committed_at=self._committed_at,
            rows=self._rows,
            transactions=1,
            **lineage._asdict(),
        )
        self._writer.commit(self._files, info)

    def _add(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._ordinal += batch.num_rows
        self._rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= STAGE_BYTES:
            self._stage()

    def _stage(self) -> None:
        if self._waiting:
            self._files += self._writer.stage(pa.Table.from_batches(self._waiting, LOG_SCHEMA))
            self._waiting, self._waiting_bytes = [], 0

    def _control(self, schema: TableSchema, operation: Operation, payload: bytes) -> pa.RecordBatch:
        order = RowOrder(int(self.position), self._ordinal, 0, self._committed_at)
        return control_row(order, operation, schema.relation, schema.topic, payload)
