"""Rewriting of data files: copies the live rows of some files of a target into one new file, while merges continue.

Two kinds of files are rewritten: files with many deleted rows, and small files. A deletion vector marks a row as
deleted, but readers still read the row, and its values stay on disk. So a file is rewritten once a sixth of its rows
is deleted. Each deleted row then costs at most five copied rows, whatever the size of the table. Small files are
merged because every batch adds a file.

`write` may run at the same time as merges. If a merge deletes rows meanwhile, `commit` deletes them in the new file
too. No merge may run during `commit`, which takes as long as a small merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap

from cdc.delta_protocol.actions import Action, add_action, commit_info
from cdc.delta_protocol.deletion_vectors import encode, rows_of
from cdc.delta_protocol.table_storage import TableStorage
from cdc.failpoint import hit
from pipelines.sinks.delta.indexed.delta_log import (
    ATTEMPTS,
    LiveFile,
    LiveFiles,
    new_data_path,
)
from pipelines.sinks.delta.indexed.plain_schema import plain_schema
from pipelines.sinks.delta.new_data_files import SAMPLE_ROWS, FileStatistics, parquet_options

DELETED: Final = 6
"""Divisor of the number of rows: a file is rewritten when at least 1/DELETED of its rows is deleted."""
TOGETHER: Final = 32 << 20
"""Maximum total bytes of the data files that are rewritten into one file; a larger file is rewritten alone."""
_BATCH: Final = 1 << 15
_ROW_GROUP: Final = 1 << 15
"""Number of rows in a row group. A reader that needs one row reads the whole row group."""


@dataclass(frozen=True, slots=True)
class RewrittenFile:
    """A new data file that no commit has added yet, and the files whose live rows it contains."""

    sources: tuple[LiveFile, ...]
    """The old files. Rows in `LiveFile.deleted` of an old file were deleted already, so they were not copied."""
    starts: tuple[int, ...]
    """For each old file, the row number in the new file at which its rows begin."""
    file: LiveFile
    rows: int


def files_with_deleted_rows(files: Iterable[LiveFile]) -> list[LiveFile]:
    """Return the files with enough deleted rows to be rewritten; the greatest share of deleted rows is first."""
    shares = [(file.vector["cardinality"] / file.rows, file) for file in files if file.vector is not None and file.rows]
    due = [(share, file) for share, file in shares if share * DELETED >= 1]
    return [file for _, file in sorted(due, key=lambda found: -found[0])]


def small_files(files: Iterable[LiveFile], limit: int) -> list[LiveFile]:
    """Return the small files of the partition that has most of them, the smallest first.

    A file is small if it has less than `limit` bytes. The list is empty if no partition has two small files.
    """
    most = max(small_by_partition(files, limit), key=len, default=[])
    return most if len(most) > 1 else []


def small_by_partition(files: Iterable[LiveFile], limit: int) -> list[list[LiveFile]]:
    """Return the files with less than `limit` bytes of each partition that has any, the smallest first."""
    by_partition: dict[tuple[tuple[str, str | None], ...], list[LiveFile]] = {}
    for file in files:
        if file.add["size"] < limit:
            by_partition.setdefault(_partition(file), []).append(file)
    return [sorted(small, key=lambda file: int(file.add["size"])) for small in by_partition.values()]


def together(files: Sequence[LiveFile]) -> list[LiveFile]:
    """Return files to rewrite into one: the first file, then others of its partition, up to TOGETHER bytes in total."""
    chosen, size = list[LiveFile](), 0
    for file in files:
        if chosen and _partition(file) != _partition(chosen[0]):
            continue
        size += file.add["size"]
        if chosen and size > TOGETHER:
            break
        chosen.append(file)
    return chosen


def write(
    storage: TableStorage,
    sources: Sequence[LiveFile],
    columns: Sequence[str],
    described: Sequence[str],
    pace: Callable[[int], None],
) -> RewrittenFile:
    """Write the live rows of data files of one partition to one new file, in their order.

    columns: the columns of the table; others are left out. described: the columns that get file statistics. pace:
    function that is called with the number of copied bytes; it may wait, or raise an exception to stop.
    """
    path = new_data_path()
    statistics = FileStatistics(described)
    starts = list[int]()
    with ExitStack() as opened:
        files = [opened.enter_context(storage.open(source.path)) for source in sources]
        # INT96, which Spark may have written, has years that nanoseconds do not have
        contents = [pq.ParquetFile(file, coerce_int96_timestamp_unit="us") for file in files]
        schema = _common_schema((content.schema_arrow for content in contents), columns)
        options = parquet_options(schema, _sample(contents))
        sink = opened.enter_context(storage.open_new(path))
        with pq.ParquetWriter(sink, schema, **options) as writer:
            for rows in _joined(_copied(sources, contents, schema, starts, pace)):
                writer.write_batch(rows, row_group_size=_ROW_GROUP)
                statistics.add(rows)
    # the rows have the order of the old files, so the new file is as well sorted as they are
    modified_at = max(int(source.add["modificationTime"]) for source in sources)
    size = int(storage.file_system.get_file_info(path).size)
    add = add_action(path, size, statistics.to_json(), sources[0].add.get("partitionValues"))
    add |= {"modificationTime": modified_at, "dataChange": False}
    return RewrittenFile(tuple(sources), tuple(starts), LiveFile(add), statistics.rows)


def commit(storage: TableStorage, files: LiveFiles, done: RewrittenFile, signature: Action) -> bool:
    """Replace the old files by the new file, in one commit; return whether that was done. No merge may run.

    Returns False, and changes nothing, if another client replaced an old file, undeleted one of its rows, or changed
    columns or features of the table. Also returns False if other clients commit during each attempt, or if a VACUUM
    deleted the new file, which no commit names yet. signature: fields of the commit info by which the sink knows its
    own commits.
    """
    known = files.metadata, files.protocol
    if not storage.exists(done.file.path):
        return False
    for _ in range(ATTEMPTS):
        deleted = _deleted_meanwhile(files, done)
        if deleted is None or (files.metadata, files.protocol) != known:
            return False
        current = [files.by_path[source.add["path"]] for source in done.sources]
        new = [] if len(deleted) == done.rows else [_without(storage, done.file, deleted)]
        actions = [commit_info("OPTIMIZE", **signature), *(source.remove(data_change=False) for source in current)]
        actions += [{"add": file.add} for file in new]
        try:
            files.commit(actions, [*(source.add["path"] for source in current), *new])
        except FileExistsError:
            files.advance()
            continue
        hit("delta_rewrite_committed")
        return True
    return False


def _sample(contents: Sequence[pq.ParquetFile]) -> pa.Table:
    """Return the first rows of the file with the most rows."""
    largest = max(contents, key=lambda content: int(content.metadata.num_rows))
    found = pa.Table.from_batches([*islice(largest.iter_batches(SAMPLE_ROWS), 1)], largest.schema_arrow)
    return found.cast(plain_schema(found.schema))


def _copied(
    sources: Sequence[LiveFile],
    contents: Sequence[pq.ParquetFile],
    schema: pa.Schema,
    starts: list[int],
    pace: Callable[[int], None],
) -> Iterator[pa.RecordBatch]:
    """Yield the live rows of the old files in their order; append to `starts` the row number at which each begins."""
    copied = 0
    for source, content in zip(sources, contents, strict=True):
        starts.append(copied)
        deleted, first = rows_of(source.deleted).astype(np.int64), 0
        for batch in content.iter_batches(batch_size=_BATCH, use_threads=False):
            rows = _in_schema(_live_rows(batch, deleted, first), schema)
            first += batch.num_rows
            copied += rows.num_rows
            yield rows
            pace(source.add["size"] * batch.num_rows // content.metadata.num_rows)


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of at least _BATCH rows, the last one excepted.

    To write and describe a batch of a few rows takes as long as one of a thousand rows.
    """
    gathered, count = list[pa.RecordBatch](), 0
    for batch in batches:
        gathered.append(batch)
        count += batch.num_rows
        if count >= _BATCH:
            yield pa.concat_batches(gathered)
            gathered, count = [], 0
    if gathered:
        yield pa.concat_batches(gathered)


def _without(storage: TableStorage, file: LiveFile, deleted: BitMap) -> LiveFile:
    """Write a deletion vector for the rows `deleted` of a file, and return the file with this vector."""
    if not deleted:
        return file
    path, content, (vector,) = encode([deleted])
    storage.write(path, content)
    return file.without(deleted, vector, data_change=False)


def _partition(file: LiveFile) -> tuple[tuple[str, str | None], ...]:
    return tuple(sorted((file.add.get("partitionValues") or {}).items()))


def _common_schema(schemas: Iterable[pa.Schema], columns: Sequence[str]) -> pa.Schema:
    """Return the columns that at least one file has, in the table's order; the first such file sets the type."""
    found: dict[str, pa.Field] = {}
    for schema in schemas:
        for field in plain_schema(schema.remove_metadata()):
            found.setdefault(field.name, field.with_nullable(True))
    return pa.schema([found[name] for name in columns if name in found])


def _live_rows(batch: pa.RecordBatch, deleted: np.ndarray, first: int) -> pa.RecordBatch:
    """Return the rows of a batch that are not deleted. first: number of its first row in the data file."""
    begin, end = np.searchsorted(deleted, [first, first + batch.num_rows])
    if begin == end:
        return batch
    live = np.ones(batch.num_rows, bool)
    live[deleted[begin:end] - first] = False
    return batch.cast(plain_schema(batch.schema)).filter(pa.array(live))


def _in_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if batch.schema.equals(schema):
        return batch
    columns = [
        batch[field.name].cast(field.type) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _deleted_meanwhile(files: LiveFiles, done: RewrittenFile) -> BitMap | None:
    """Return the rows of the new file that were deleted since it was written.

    Returns None if an old file was removed from the table. Also returns None if a row was undeleted that the new file
    does not contain.
    """
    found = BitMap()
    for source, start in zip(done.sources, done.starts, strict=True):
        current = files.by_path.get(source.add["path"])
        if current is None or source.deleted - current.deleted:
            return None
        rows = rows_of(current.deleted - source.deleted).astype(np.int64)
        before = np.searchsorted(rows_of(source.deleted).astype(np.int64), rows)
        found |= BitMap((rows - before + start).astype(np.uint32))
    return found
