"""Row search by executors: rows of a target that are equal to the rows which a batch without a key deletes.

1. Tasks hash the deleted rows and the rows of the target, by all values, and divide the hashes into shards.
2. A task for each shard compares the hashes. Among equal rows of the target it takes the latest ones, as
   `keyless_deletes` does for a small batch. Each result is position and ordinal of a row to delete.

The hashes have 128 bits, and their key is secret, as those of the key index. No value of the target leaves its task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc.delta_protocol.deletion_vectors import Descriptor, decode, rows_of
from cdc.delta_protocol.table_storage import TableStorage, storage_of
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.folding.key_parts import split_by_part
from pipelines.folding.keyless_fold import keep_latest_per_id
from pipelines.runtime.executor_code import forwarding_errors
from pipelines.sinks.delta.damage_errors import reading_files
from pipelines.sinks.delta.indexed.delta_log import LiveFile
from pipelines.sinks.delta.indexed.key_hashes import canonical_text, hash_keys
from pipelines.sinks.delta.indexed.key_index import KeyHashes, KeyRun
from pipelines.sinks.delta.indexed.plain_schema import plain_schema
from pipelines.sinks.delta.merge_source import is_after
from pipelines.sinks.delta.target_columns import POSITION_KEY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pipelines.sinks.delta.stored_columns import StoredColumns

HASHES: Final = "shard int, is_stored boolean, words binary"
"""The columns of a frame of hashes: number of the shard, whether the rows are in the target, and for each row the two
words of its hash, its position and its ordinal.
"""
FOUND: Final = "found long, missing long, first long, places binary"
"""The columns of a frame of results: number of found rows, number of deletes without an equal row, position of the
first such delete, and position and ordinal of each found row.
"""
SHARD_ROWS: Final = 1_000_000
"""Approximate rows of the target whose hashes a task has at once; each needs 32 bytes."""
BATCH_ROWS: Final = 65_536
"""Number of rows of a data file that a task has at once."""
_WORDS: Final = 4
_UNPOSITIONED: Final = -1
"""Position of a row that another client wrote. A merge finds rows by position, so it never deletes such a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSearch:
    """A search for equal rows. Executors receive pickled instances."""

    columns: tuple[str, ...]
    """Names of the columns that are compared."""
    shards: int
    secret: bytes
    """The key of the hash function."""

    def hashes(self, rows: pa.Table, *, is_stored: bool) -> Iterator[pa.RecordBatch]:
        """Yield the hashes of typed rows as rows of a frame with the columns HASHES."""
        hashes = hash_rows([rows[name] for name in self.columns], rows.num_rows, self.secret)
        places = (pc.fill_null(rows[name], _UNPOSITIONED).to_numpy().view(np.uint64) for name in POSITION_KEY)
        words = [hashes.high, hashes.low, *places]
        shards = (hashes.low % np.uint64(self.shards)).astype(np.int64)
        for shard, numbers in split_by_part(shards, self.shards):
            if len(numbers):
                chosen = numbers.to_numpy()
                content = np.stack([column[chosen] for column in words]).tobytes()
                yield pa.RecordBatch.from_pydict(
                    {"shard": pa.array([shard], pa.int32()), "is_stored": [is_stored], "words": [content]}
                )

    def find(self, deleted: DataFrame, stored: DataFrame) -> DataFrame:
        """Return the frame of the results, with the columns FOUND.

        deleted, stored: frames with the columns HASHES, of the deleted rows and of the rows in the target.
        """
        return deleted.unionByName(stored).repartitionById(self.shards, "shard").mapInArrow(_match, FOUND)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A live data file of the target. Executors receive pickled instances."""

    path: str
    vector: Descriptor | None
    partition: tuple[tuple[str, str | None], ...]
    """Partition columns with their values as text."""

    @classmethod
    def of(cls, file: LiveFile) -> Self:
        """Return what executors need of a live file."""
        return cls(file.path, file.vector, tuple((file.add.get("partitionValues") or {}).items()))

    def live_rows(self, storage: TableStorage, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        """In a task: yield some columns of the rows that are not deleted. The values of partitions are texts."""
        deleted = np.empty(0, np.uint32) if self.vector is None else rows_of(decode(self.vector, storage.read))
        values, start = dict(self.partition), 0
        with storage.open(self.path) as opened:
            content = pq.ParquetFile(opened, coerce_int96_timestamp_unit="us")
            stored = [name for name in columns.names if name in content.schema_arrow.names]
            for batch in content.iter_batches(BATCH_ROWS, columns=stored):
                rows = batch.cast(plain_schema(batch.schema))
                arrays = [
                    rows[field.name] if field.name in stored else _constant(field, values, rows.num_rows)
                    for field in columns
                ]
                is_live = np.isin(np.arange(start, start + rows.num_rows), deleted, invert=True)
                yield pa.RecordBatch.from_arrays(arrays, names=columns.names).filter(pa.array(is_live))
                start += rows.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletableRows:
    """The rows of a target that may be deleted. Executors receive pickled instances."""

    uri: str
    stored: StoredColumns
    """The columns of the target, and how those of the batch are made from them."""
    files: tuple[StoredFile, ...]
    truncated: tuple[int, int] | None
    """(position, ordinal) of a truncate in the range; rows older than it are left out."""

    def hashes(self, session: SparkSession, search: RowSearch, tasks: int) -> DataFrame:
        """Return the frame of the hashes, with the columns HASHES. tasks: number of tasks that read the files."""
        rows = self

        def hash_files(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                for batch in numbers:
                    for number in batch["id"].to_pylist():
                        yield from rows.hashes_in(rows.files[number], search)

        return session.range(0, len(self.files), 1, tasks).mapInArrow(hash_files, HASHES)

    def hashes_in(self, file: StoredFile, search: RowSearch) -> Iterator[pa.RecordBatch]:
        """In a task: yield the hashes of the live rows of a data file."""
        with reading_files(self.uri):
            for batch in file.live_rows(storage_of(self.uri), self.read_columns):
                yield from self.hashes_of(batch, search)

    @property
    def read_columns(self) -> pa.Schema:
        """The columns of the target that are read."""
        return pa.schema([self.stored.present.field(name) for name in dict.fromkeys(self.stored.names.values())])

    def hashes_of(self, batch: pa.RecordBatch, search: RowSearch) -> Iterator[pa.RecordBatch]:
        """In a task: yield the hashes of some rows with columns of the target."""
        rows = self.stored.to_rows(batch)
        if self.truncated is not None:
            rows = rows.filter(is_after(rows, self.truncated))
        yield from search.hashes(rows, is_stored=True)


def _constant(column: pa.Field, values: Mapping[str, str | None], rows: int) -> pa.Array:
    """Return a column that a data file does not contain: a partition column, or one that is newer than the file."""
    if column.name in values:
        return pa.repeat(pa.scalar(values[column.name], pa.string()), rows)
    return pa.nulls(rows, column.type)


def hash_rows(columns: Sequence[pa.ChunkedArray], rows: int, secret: bytes) -> KeyHashes:
    """Return the hash of each row: equal for rows that `keyless_fold.row_ids` numbers alike. NULL equals NULL.

    rows: number of rows. secret: the key of the hash function.
    """
    texts = [pa.repeat(pa.scalar("", pa.large_string()), rows)]
    for column in columns:
        values = _comparable_texts(column)
        empty = pa.scalar(b"" if pa.types.is_large_binary(values.type) else "", values.type)
        texts += [values.is_null().cast(pa.large_string()), pc.fill_null(values, empty)]
    hashes, _ = hash_keys(texts, secret)
    return hashes


def _comparable_texts(column: pa.ChunkedArray) -> pa.Array:
    """Convert values to texts, which are equal for values that `keyless_fold.row_ids` takes as equal."""
    values = column.combine_chunks()
    if pa.types.is_floating(values.type):  # as bits: 0 and -0 differ, NaN equals NaN
        values = values.view(pa.int64() if values.type == pa.float64() else pa.int32())
    elif pa.types.is_nested(values.type):
        values = pa.array([None if value is None else repr(value) for value in values.to_pylist()], pa.string())
    return canonical_text(values)


def _match(entries: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a task: yield the result of one shard."""
    deleted = [np.zeros((_WORDS, 0), np.uint64)]
    stored: list[np.ndarray] = []
    for batch in entries:
        for is_stored, content in zip(batch["is_stored"].to_pylist(), batch["words"], strict=True):
            words = np.frombuffer(content.as_buffer(), np.uint64).reshape(_WORDS, -1)
            (stored if is_stored else deleted).append(words)
    wanted = np.concatenate(deleted, axis=1)
    if not wanted.shape[1]:
        return
    run = KeyRun.of(KeyHashes(wanted[0], wanted[1]), np.zeros(wanted.shape[1], np.uint64), ())
    equal = [words[:, np.unique(run.find(KeyHashes(words[0], words[1]))[0])] for words in stored]
    yield _latest_equal(wanted, np.concatenate([wanted[:, :0], *equal], axis=1))


def _latest_equal(wanted: np.ndarray, stored: np.ndarray) -> pa.RecordBatch:
    """Return the result for deleted rows and the equal rows of the target, each a column of four words."""
    count = wanted.shape[1]
    ids = _numbered(*np.concatenate([wanted[:2], stored[:2]], axis=1))
    kinds = int(ids.max()) + 1
    deletes, present = np.bincount(ids[:count], minlength=kinds), np.bincount(ids[count:], minlength=kinds)
    too_few = deletes > present
    places = pa.table({"position": stored[2].view(np.int64), "ordinal": stored[3].view(np.int64)})
    latest = keep_latest_per_id(places, ids[count:], deletes)
    latest = latest.filter(pc.not_equal(latest["position"], _UNPOSITIONED))
    first = wanted[2].view(np.int64)[too_few[ids[:count]]]
    content = np.stack([latest[name].to_numpy() for name in latest.column_names]).tobytes()
    return pa.RecordBatch.from_pydict(
        {
            "found": [latest.num_rows],
            "missing": [int((deletes - present).clip(0).sum())],
            "first": pa.array([int(first.min()) if first.size else None], pa.int64()),
            "places": [content],
        }
    )


def _numbered(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Return one number per hash; equal hashes have the same number."""
    order = np.lexsort((low, high))
    begins = np.ones(order.size, bool)
    begins[1:] = (np.diff(high[order]) != 0) | (np.diff(low[order]) != 0)
    ids = np.empty(order.size, np.int64)
    ids[order] = np.cumsum(begins) - 1
    return ids


def places_in(results: pa.RecordBatch) -> Iterator[pa.Table]:
    """Yield position and ordinal of the found rows of some results."""
    for content in results["places"]:
        position, ordinal = np.frombuffer(content.as_buffer(), np.int64).reshape(2, -1)
        yield pa.table({POSITION_COLUMN: position, ORDINAL_COLUMN: ordinal})
