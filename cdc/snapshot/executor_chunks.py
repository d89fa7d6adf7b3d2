"""Chunks that executors of Spark read: tasks, the files that executors write, and how the reader inserts them.

While `cdc spark submit copy` offers executors, they read the chunks of whole tables in place of the reader. Everything
else of a copy stays with the reader: it plans the chunks, opens their windows, sends the watermarks, merges, commits,
and records the progress. A chunk goes this way:

1. The reader opens a watermark window at R and posts a ChunkTask: a block range and the schema version of the stream.
2. An executor reads the range over its own connection, in a snapshot that it takes after it got the task. It encodes
   the rows as a file of log rows without their place, and writes the file into the folder CHUNKS of the log. It returns
   a StagedChunk: the name of the file, and the snapshot.
3. The reader checks that the snapshot sees every transaction up to R, takes the file, and sends the watermark. At the
   watermark H, row groups without a key that the window changed are copied into a data file of the log with their
   place; the rows of the other row groups are merged with the window as those of any chunk.

**Why the result is exact.** The proof for a chunk that the reader reads needs four things. The window opens before the
snapshot is taken: the task is posted after it opened. The snapshot sees all transactions up to R: the reader checks it.
The watermark is sent after the snapshot was taken: the reader sends it after it got the result. The rows at H are those
of the snapshot, without those that (R, H] decides: `merge_encoded` applies `merge_keyed` to each row group with such a
key, and in the other row groups there is nothing to apply. It does not matter which process read the rows, nor how
often: each reading is a snapshot of its own between R and H. So chunks need no common exported snapshot. A session that
exported one would have to stay open until the end of the copy, keep the source from removing dead rows all that time,
and its loss would invalidate everything that was read.

| what happens | result |
|---|---|
| Spark runs a task twice, or after its file was written | each attempt writes its own file; the result names one |
| an executor dies | Spark runs the task again, in the window that is still open |
| the driver dies, or cannot use its executors | the reader drops the windows, and reads the other chunks itself |
| the reader or the replication session ends | its windows are gone; what is not durable is read again |
| a result arrives for a chunk that the reader dropped | the catalog no longer has the task, and nobody takes it |
| two readers | only one has the slot, and the log refuses a commit of the other one |
| DDL before the snapshot | the executor compares the columns; the reader writes the new version first |
| DDL in the window | the stream has a new version, so the chunk is read again |
| the table is rewritten | it gets another file number, so its copy begins again |
| a standby as source, or several hosts in the DSN | an executor reads from no other server than the reader |

Only the reader commits, and its commits are fenced. A file in CHUNKS is never part of the log: the reader deletes it
when it has read it, and deletes all of them when a copy begins.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, Self
from uuid import uuid4

from cdc.bucket_files import BucketPath, Root
from cdc.config.source import Undecodable
from cdc.file_modes import make_private_directory
from cdc.log.table_io import encode, write_encoded
from cdc.pgoutput.load_kernels import load_copy_kernels
from cdc.postgres.chunk_queries import (
    BlockRange,
    StoredTable,
    block_range_query,
    has_columns,
    snapshot_transaction,
)
from cdc.postgres.connection import check_same_server, connect, server_start
from cdc.postgres.sql_ascii import copy_text_repair_of
from cdc.postgres.tables import TableName
from cdc.snapshot.chunk_rows import ChunkTooLarge, read_rows
from cdc.table import TableSchema

CHUNKS: Final = "_chunks"
"""Folder of the log with the files that executors write; no file stays there."""


class StagedOutcome(StrEnum):
    """Outcome of a task."""

    #: The rows were read. Without rows there is no file.
    STAGED = "staged"
    #: The rows need more memory than the limit.
    TOO_LARGE = "too_large"
    #: The table has other columns than the schema of the task.
    OTHER_COLUMNS = "other_columns"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTask:
    """A chunk that an executor must read; it contains no secret."""

    schema: TableSchema
    span: BlockRange
    publication: str
    server: str
    """Start time of the server from which the reader captures."""
    limit: int | None
    """Maximum size of the rows in Arrow format, in bytes; None for no limit."""

    def to_json(self) -> dict[str, Any]:
        """Return the task as a JSON document for the catalog."""
        return {
            "schema": self.schema.to_json().decode(),
            "span": asdict(self.span) | {"leaf": asdict(self.span.leaf) | {"name": list(self.span.leaf.name)}},
            "publication": self.publication,
            "server": self.server,
            "limit": self.limit,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Build the task from the result of `to_json`."""
        span = dict(fields["span"])
        leaf = span["leaf"] | {"name": TableName(*span["leaf"]["name"])}
        lines = span["lines"] and tuple(span["lines"])
        return cls(
            schema=TableSchema.from_json(fields["schema"]),
            span=BlockRange(**span | {"leaf": StoredTable(**leaf), "lines": lines}),
            publication=fields["publication"],
            server=fields["server"],
            limit=fields["limit"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedChunk:
    """Result of a task."""

    outcome: StagedOutcome
    snapshot: str = ""
    """The snapshot of the rows, as `pg_current_snapshot()` prints it."""
    file: str | None = None
    """Name of the file in CHUNKS; None without rows."""
    rows: int = 0
    nbytes: int = 0
    """Size of the rows in Arrow format, in bytes."""
    text_bytes: int = 0
    """Number of bytes that COPY sent for the rows."""
    checksum: int = 0
    """CRC-32 of the file."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Build the result from its fields in a JSON document."""
        return cls(**{**fields, "outcome": StagedOutcome(fields["outcome"])})

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON document for the catalog."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ExecutorAccess:
    """How an executor reaches the source and the log; it is sent to executors, and never stored."""

    dsn: str = field(repr=False)
    root: Root
    """Root of the log."""
    undecodable: Undecodable

    @property
    def folder(self) -> Root:
        """The folder for the files of executors, which exists."""
        folder = self.root / CHUNKS
        if not isinstance(folder, BucketPath):
            make_private_directory(folder)
        return folder


def stage_chunk(task: ChunkTask, access: ExecutorAccess) -> StagedChunk:
    """Read the rows of a task and write them to a file of their own; runs on an executor.

    Raises SourceUnreachable if the source is another server than that of the reader, and the errors of the source and
    of the log's storage.
    """
    load_copy_kernels()  # before the snapshot: compiling takes seconds
    schema, span = task.schema, task.span
    with connect(access.dsn, application_name="cdc copy") as conn:
        check_same_server(server_start(conn), task.server)
        repair = copy_text_repair_of(conn, access.undecodable)(schema)
        try:
            with snapshot_transaction(conn, schema, span.leaf) as visibility:
                if not has_columns(conn, schema):
                    return StagedChunk(outcome=StagedOutcome.OTHER_COLUMNS)
                query = block_range_query(conn, schema, span, task.publication)
                rows = read_rows(conn, query, schema, repair, task.limit)
        except ChunkTooLarge:
            return StagedChunk(outcome=StagedOutcome.TOO_LARGE)
    staged = StagedChunk(outcome=StagedOutcome.STAGED, snapshot=str(visibility), text_bytes=rows.text_bytes)
    if not rows.count:
        return staged
    content, name = encode(rows.table), f"{uuid4().hex}.parquet"
    write_encoded(content, access.folder / name)
    return StagedChunk(
        outcome=StagedOutcome.STAGED,
        snapshot=str(visibility),
        file=name,
        rows=rows.count,
        nbytes=rows.nbytes,
        text_bytes=rows.text_bytes,
        checksum=zlib.crc32(content),
    )
