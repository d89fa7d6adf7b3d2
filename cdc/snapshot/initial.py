"""initial_copy: every row that exists before the stream begins, in one commit of the log.

One REPEATABLE READ transaction under the slot's exported snapshot reads every table; the rows stand at the
slot's consistent point − 1, because the next transaction's commit record can lie at the consistent point itself.
A slot without that commit is worthless and is made anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from cdc.change import LOG_SCHEMA, Operation
from cdc.errors import PreflightFailed
from cdc.failpoint import hit
from cdc.log.append import LogWriter, StagedFile
from cdc.log.layout import CommitInfo
from cdc.metrics import SNAPSHOT_ROWS, Figures
from cdc.pgoutput.copy_text import CopyDecoder
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.copy import begin_snapshot, copy_table, hold_tables
from cdc.postgres.publication import ensure_publication
from cdc.postgres.slot import create_slot, drop_slot, exclusive, slot_status
from cdc.postgres.tables import match_tables, read_schema
from cdc.table import TableSchema

STAGE_BYTES: Final = 64 * 1024 * 1024
"""Rows in memory before they go to a data file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource:
    """What to copy and from where."""

    pipeline: str
    dsn: str
    slot: str
    publication: str
    patterns: Sequence[str]
    exclude: Sequence[str]
    timeline: int


def initial_copy(source: CopySource, writer: LogWriter, figures: Figures) -> Position:
    """Make publication and slot, copy every table, commit; returns the log's first durable position.

    Raises SlotInUse while another reader copies from the same source.
    """
    with connect(source.dsn, application_name="cdc snapshot") as conn, exclusive(conn, source.slot):
        tables = match_tables(conn, source.patterns, source.exclude)
        if not tables:
            raise PreflightFailed(
                f"no table matches {list(source.patterns)!r}", remedy="correct 'tables' in the definition"
            )
        ensure_publication(conn, source.publication, [name for _, name in tables])
        if slot_status(conn, source.slot) is not None:
            drop_slot(conn, source.slot)
        with create_slot(source.dsn, source.slot) as snapshot, connect(source.dsn, autocommit=False) as reading:
            begin_snapshot(reading, snapshot.name)
            hold_tables(reading, tables)
            copy = _Copy(source, writer, figures, Position.of(snapshot.consistent_point - 1))
            for oid, _ in tables:
                if (schema := read_schema(reading, oid)) is not None:
                    copy.table(schema, copy_table(reading, schema))
            copy.commit()
    return copy.position


class _Copy:
    """One copy on its way to one commit."""

    def __init__(self, source: CopySource, writer: LogWriter, figures: Figures, position: Position) -> None:
        self.position = position
        self._source, self._writer, self._figures = source, writer, figures
        self._committed_at = time.time_ns() // 1000
        self._ordinal = 0
        self._rows = 0
        self._files: list[StagedFile] = []
        self._waiting: list[pa.RecordBatch] = []
        self._copied: list[TableSchema] = []

    def table(self, schema: TableSchema, chunks: Iterator[bytes]) -> None:
        """Take one table: its schema row, then its rows."""
        self._add(self._control(schema, Operation.SCHEMA, schema.to_json()))
        decoder = CopyDecoder(
            schema, position=self.position, xid=0, committed_at=self._committed_at, first_ordinal=self._ordinal
        )
        for chunk in chunks:
            batch = decoder.feed(chunk)
            if batch is not None:
                self._add(batch)
                self._figures.add(SNAPSHOT_ROWS, batch.num_rows, self._source.pipeline, schema.topic)
        decoder.finish()
        self._copied.append(schema)

    def commit(self) -> None:
        """Close every generation and make the copy visible, whole."""
        for schema in self._copied:
            self._add(self._control(schema, Operation.GENERATION, str(int(self.position)).encode()))
        self._stage()
        hit("after_copy_staged")
        info = CommitInfo(
            last=self.position,
            committed_at=self._committed_at,
            timeline=self._source.timeline,
            rows=self._rows,
            transactions=1,
        )
        self._writer.commit(self._files, info)

    def _add(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._ordinal += batch.num_rows
        self._rows += batch.num_rows
        if sum(b.nbytes for b in self._waiting) >= STAGE_BYTES:
            self._stage()

    def _stage(self) -> None:
        if self._waiting:
            self._files += self._writer.stage(pa.Table.from_batches(self._waiting, LOG_SCHEMA))
            self._waiting = []

    def _control(self, schema: TableSchema, operation: Operation, payload: bytes) -> pa.RecordBatch:
        row: dict[str, Any] = dict.fromkeys(LOG_SCHEMA.names)
        row |= {
            "position": int(self.position),
            "ordinal": self._ordinal,
            "xid": 0,
            "committed_at": self._committed_at,
            "relation": schema.relation,
            "topic": schema.topic,
            "op": operation.value,
            "partial": False,
            "payload": payload,
        }
        return pa.RecordBatch.from_pylist([row], LOG_SCHEMA)
