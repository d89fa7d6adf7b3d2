"""The rows of one chunk as log rows without their place, as the reader and the executors of Spark read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

import pyarrow as pa

from cdc.log.encoded_chunk import EncodedChunk
from cdc.log_row import LOG_SCHEMA
from cdc.pgoutput.copy_decoder import CopyDecoder, Lines
from cdc.position import Position
from cdc.postgres.copy_in_snapshot import copy_rows
from cdc.postgres.visibility import Visibility
from cdc.table import TableSchema

SeesAll: TypeAlias = Callable[[Visibility], bool]
"""Returns whether a snapshot sees every transaction that the stream had sent before the chunk's window opened."""


class ChunkTooLarge(Exception):
    """Raised for a chunk that needs more memory than the limit of a chunk."""


class NotRead(Enum):
    """Why a snapshot cannot give the rows of a chunk."""

    #: The snapshot does not see a transaction that the stream has sent already.
    NOT_VISIBLE = auto()
    #: The table has other columns than its last schema version in the stream.
    OTHER_COLUMNS = auto()


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Rows that were read for one chunk, in memory or encoded."""

    table: pa.Table
    """Rows in LOG_SCHEMA, without their place in the log; empty if `encoded` contains the rows."""
    text_bytes: int
    """Number of bytes that COPY sent for the rows."""
    nbytes: int
    """Size of the rows in Arrow format, in bytes."""
    encoded: EncodedChunk | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.table.num_rows if self.encoded is None else self.encoded.rows

    @property
    def last_key(self) -> tuple[str, ...] | None:
        """Key of the last row; None without rows in memory, or without a key."""
        key = self.table["key"][-1].as_py() if self.table.num_rows else None
        return None if key is None else tuple(key)


def read_rows(
    conn: Any, query: Any, schema: TableSchema, repair: Callable[[Lines], Lines], limit: int | None
) -> ChunkRows:
    """Run a query of the columns `schema.sent` with COPY, and return its rows.

    `limit` is the maximum size of the rows in Arrow format, in bytes. Raises ChunkTooLarge if the rows need more.
    """
    decoder = CopyDecoder(schema, position=Position(0), xid=0, committed_at=0, first_ordinal=0)
    batches = list[pa.RecordBatch]()
    text_bytes = arrow_bytes = 0
    for lines in copy_rows(conn, query, schema):
        text_bytes += len(lines)
        if (batch := decoder.feed(repair(lines))) is not None:
            batches.append(batch)
            arrow_bytes += batch.nbytes
            if limit is not None and arrow_bytes > limit:
                raise ChunkTooLarge
    decoder.finish()
    table = pa.Table.from_batches(batches, LOG_SCHEMA)
    return ChunkRows(table, text_bytes, table.nbytes)
