"""Rows that do not come from the stream: they have one position, get their ordinals here, and become one commit.

Whenever the collected rows exceed STAGE_BYTES, they are written to data files. The commit makes all these files visible
at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa

from cdc.log.disk_format import CommitInfo, CommitSource
from cdc.log.writer import LogWriter, StagedFile
from cdc.log_row import LOG_SCHEMA, Operation, RowOrder, control_row, generation_payload
from cdc.position import Position
from cdc.table import TableSchema

STAGE_BYTES: Final = 64 * 1024 * 1024
"""Size in bytes from which the collected rows are written from memory to data files."""


class RowsAtPosition:
    """Collects the rows of one position, and commits them."""

    def __init__(self, writer: LogWriter, position: Position, committed_at: int) -> None:
        """committed_at: of all rows, in microseconds since 1970 UTC."""
        self.position, self._writer, self._committed_at = position, writer, committed_at
        self.number = 0
        """Number of rows, which is the ordinal of the next one."""
        self._files: list[StagedFile] = []
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0

    @property
    def order(self) -> RowOrder:
        """The place of the next row."""
        return RowOrder(int(self.position), self.number, 0, self._committed_at)

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows of LOG_SCHEMA that begin at `order`."""
        self._waiting.append(batch)
        self.number += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= STAGE_BYTES:
            self.stage()

    def add_version(self, schema: TableSchema) -> None:
        """Add the `s` row of a table: its columns, its key and its state."""
        self.add(control_row(self.order, Operation.SCHEMA, schema.relation, schema.topic, schema.to_json()))

    def add_end(self, schema: TableSchema) -> None:
        """Add the `g` row of a table: rows of it before this position are deleted."""
        began = generation_payload(self.position)
        self.add(control_row(self.order, Operation.GENERATION, schema.relation, schema.topic, began))

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Take back the rows that the block has added, and their files, if it raises an error."""
        self.stage()
        number, files = self.number, len(self._files)
        try:
            yield
            self.stage()
        except BaseException:
            self._waiting, self._waiting_bytes, self.number = [], 0, number
            for file in self._files[files:]:
                file.path.unlink(missing_ok=True)
            del self._files[files:]
            raise

    def stage(self) -> None:
        """Write the rows that are in memory to data files, which nobody sees before the commit."""
        if self._waiting:
            self._files += self._writer.stage(pa.Table.from_batches(self._waiting, LOG_SCHEMA))
            self._waiting, self._waiting_bytes = [], 0

    def commit(self, source: CommitSource, *, transactions: int = 1, views: str = "") -> None:
        """Commit all rows. source: the server that they come from. views: as in CommitInfo."""
        self.stage()
        info = CommitInfo(
            last=self.position,
            committed_at=self._committed_at,
            rows=self.number,
            transactions=transactions,
            views=views,
            **source._asdict(),
        )
        self._writer.commit(self._files, info)
