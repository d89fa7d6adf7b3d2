"""What executors do in a large computation of a view: they compare its rows key by key, and write the changes to files.

1. Rows of a result, or of the view in its log, are divided into parts by key. A row has its key and its image.
2. One task gets all rows of a part, of both sides. So it finds two rows of one key, and all differences of its keys.

Each Python worker imports this module, so it needs few others.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.table_io import write_parquet
from pipelines.folding.key_parts import from_ipc, split_by_part, to_ipc
from pipelines.runtime.executor_code import forwarding_errors
from pipelines.views.changed_rows import ROWS, all_new, check_key, differences
from pipelines.views.kept_rows import old_rows, view_rows

if TYPE_CHECKING:
    from cdc.bucket_files import Root
    from cdc.table import TableSchema
    from pipelines.folding.folded_parts import Piece

FILE_BYTES: Final = 32 << 20
"""Approximate bytes of changes of a file, and of rows of a result that are divided together."""
FILE: Final = "name string"
"""Schema of what `write_changes` yields, for Spark."""
PIECE: Final = "part int, is_new boolean, rows binary"
"""Schema of rows that were divided: number of the part, whether they are of the later cut, rows as an Arrow stream."""


def divide_result(
    batches: Iterator[pa.RecordBatch], schema: TableSchema, floor: int | None, parts: int, *, is_new: bool
) -> Iterator[pa.RecordBatch]:
    """Divide rows of a result. floor: time before which rows are left out.

    Raises TaskError for a value that Postgres does not have.
    """
    with forwarding_errors():
        for rows in _gathered(batches):
            yield from _divided(view_rows(rows, schema, floor), parts, is_new=is_new)


def divide_logged(
    pieces: Iterable[Piece], schema: TableSchema, parts: int, *, before: int | None
) -> Iterator[pa.RecordBatch]:
    """Divide folded rows of the log of views. before: only the rows whose time is before it; None: all rows."""
    for _, folded in pieces:
        rows = folded.filter(pc.equal(folded["op"], "u")).select(ROWS.names)
        yield from _divided(rows if before is None else old_rows(rows, schema, before), parts, is_new=False)


def write_changes(
    pieces: Iterator[pa.RecordBatch], schema: TableSchema, folder: Root, *, is_first: bool
) -> Iterator[pa.RecordBatch]:
    """Write the changes of the rows of a part to files, and yield the name of each file.

    is_first: the view is computed for the first time, so all rows are read rows. Raises TaskError for a key that two
    rows of one side have.
    """
    sides: dict[bool, list[pa.Table]] = {False: [], True: []}
    for batch in pieces:
        for is_new, stream in zip(batch["is_new"].to_pylist(), batch["rows"], strict=True):
            sides[is_new].append(from_ipc(stream.as_buffer()))
    old, new = (pa.concat_tables([ROWS.empty_table(), *sides[is_new]]) for is_new in (False, True))
    with forwarding_errors():
        for rows in (old, new):
            check_key(rows, schema)
        changes = all_new(new) if is_first else differences(old, new)
        number = max(1, -(-changes.nbytes // FILE_BYTES))
        size = max(1, -(-changes.num_rows // number))
        for start in range(0, changes.num_rows, size):
            name = f"{uuid.uuid4().hex}.parquet"
            write_parquet(changes.slice(start, size), folder / name)
            yield pa.RecordBatch.from_pydict({"name": [name]})


def _divided(rows: pa.Table, parts: int, *, is_new: bool) -> Iterator[pa.RecordBatch]:
    """Yield (part, is_new, rows): a hash of the key chooses the part of a row."""
    texts = pc.binary_join(rows["key"], "\0").cast(pa.binary()).to_pylist()
    part_of = np.fromiter(map(crc32, texts), np.uint32, rows.num_rows) % parts
    for part, numbers in split_by_part(part_of.astype(np.int64), parts):
        if len(numbers):
            columns = {"part": pa.array([part], pa.int32()), "is_new": [is_new], "rows": [to_ipc(rows.take(numbers))]}
            yield pa.RecordBatch.from_pydict(columns)


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
