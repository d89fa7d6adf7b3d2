"""Snapshot commit: one commit of rows that do not come from the stream; all these rows have the same position.

An epoch begins with a snapshot commit, which contains the schema of every table and the rows of small tables. The
command `cdc slots recover --skip-to` makes a snapshot commit that marks tables for a resync.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from cdc.failpoint import hit
from cdc.log.disk_format import CommitSource
from cdc.log.rows_at_position import RowsAtPosition
from cdc.log.writer import LogWriter
from cdc.log_row import Operation, generation_payload
from cdc.pgoutput.copy_decoder import CopiedRows, CopiedTable, Lines
from cdc.position import Position
from cdc.table import TableSchema


class SnapshotCommit:
    """One commit outside the stream: collects rows of tables, then commits all these rows at one position."""

    def __init__(
        self, writer: LogWriter, position: Position, count: Callable[[str, int], None] = lambda _topic, _rows: None
    ) -> None:
        """count: called after each batch of table rows, with the topic of the table and the number of rows."""
        self.position = position
        self._rows, self._count = RowsAtPosition(writer, position, time.time_ns() // 1000), count
        self._copied = CopiedRows(self._rows.order, self._rows.add)
        self._ended: list[TableSchema] = []
        self.tables = self.table_rows = 0
        """Number of copied tables, and number of their rows, without `s` and `g` rows."""

    def table(self, schema: TableSchema, chunks: Iterator[Lines]) -> None:
        """Add one table with its rows: first the table's `s` row, then its rows from the chunks of a COPY."""
        self._add_version(schema)
        table = CopiedTable(schema, self._copied)
        for chunk in chunks:
            if rows := table.feed(chunk):
                self.table_rows += rows
                self._count(schema.topic, rows)
        table.finish()
        self.tables += 1
        self._ended.append(schema)

    def mark(self, schema: TableSchema, *, ended: bool = False) -> None:
        """Add the `s` row of a table, but no table rows; if `ended`, targets delete the table's earlier rows."""
        self._add_version(schema)
        if ended:
            self._ended.append(schema)

    def commit(self, lineage: CommitSource) -> None:
        """Add a `g` row for every table that was copied, or marked with `ended`; then commit all rows."""
        began = generation_payload(self.position)
        for schema in self._ended:
            self._copied.control(Operation.GENERATION, schema.relation, schema.topic, began)
        self._copied.flush()
        self._rows.stage()
        hit("after_copy_staged")
        self._rows.commit(lineage)

    def _add_version(self, schema: TableSchema) -> None:
        self._copied.control(Operation.SCHEMA, schema.relation, schema.topic, schema.to_json())
