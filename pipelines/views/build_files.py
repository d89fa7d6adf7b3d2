"""What executors do in the build of a large view: they make keys and images of its rows, and write them to files.

Each Python worker imports this module, so it needs few others.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from cdc.log.table_io import write_parquet
from pipelines.runtime.executor_code import forwarding_errors
from pipelines.views.kept_rows import view_rows

if TYPE_CHECKING:
    from cdc.log.bucket_files import Root
    from cdc.table import TableSchema

FILE_BYTES: Final = 32 << 20
"""Bytes of results from which a file is written."""
FILE: Final = "name string"
"""Schema of what `write_rows` yields, for Spark."""


def write_rows(
    batches: Iterator[pa.RecordBatch], schema: TableSchema, floor: int | None, folder: Root
) -> Iterator[pa.RecordBatch]:
    """Write rows of a result to files, and yield the name of each file. floor: time before which rows are left out.

    Raises TaskError for a value that Postgres does not have.
    """
    with forwarding_errors():
        for rows in _gathered(batches):
            name = f"{uuid.uuid4().hex}.parquet"
            write_parquet(view_rows(rows, schema, floor), folder / name)
            yield pa.RecordBatch.from_pydict({"name": [name]})


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    waiting, size = list[pa.RecordBatch](), 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= FILE_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)
