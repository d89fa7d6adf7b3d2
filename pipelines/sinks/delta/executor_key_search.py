"""Key search by executors: they find rows of a target by the keys of a large batch, and write vectors that delete rows.

1. Tasks hash the keys of the batch and of the target's data files, and divide the hashes into shards.
2. A task for each shard compares the hashes. It finds the numbers of the rows in each file.
3. For rows to delete, a task for each group of files adds these numbers to the deletion vectors of the files. It writes
   the new vectors. Rows to read are read by `executor_row_lookup.py`.

Only the key columns of the target are read. No value passes through a JVM. The driver gets a short entry for each file
with deleted rows. The hashes are those of the key index, see `key_hashes.py`.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap

from cdc.delta_protocol.deletion_vectors import Descriptor, decode, encode, rows_of
from cdc.delta_protocol.table_storage import TableStorage, storage_of
from cdc.target_names import OP_COLUMN, ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.folding.key_parts import split_by_part
from pipelines.runtime.executor_code import forwarding_errors, raising_task_errors
from pipelines.sinks.delta.damage_errors import reading_files
from pipelines.sinks.delta.indexed.delta_log import LiveFile
from pipelines.sinks.delta.indexed.key_hashes import hash_keys
from pipelines.sinks.delta.indexed.key_index import KeyHashes, KeyRun, file_and_row, places_of
from pipelines.sinks.delta.stored_columns import StoredColumns, first_rows, open_data_file, read_group

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ENTRIES: Final = "shard int, stored boolean, words binary"
"""The columns of a frame of hashes: number of the shard, whether the keys are of stored rows, and 64-bit words.

The words are the hashes of keys, and then for stored rows their places, for wanted keys the number of their part.
"""
FOUND: Final = "file int, block int, part int, rows binary"
"""The columns of a frame of found rows: number of the data file, number of the block of the file that contains the
rows, part of their keys, and the row numbers in the file as a bitmap.
"""
BLOCK_BITS: Final = 20
"""A block of a data file has 2 to this power rows; several tasks read the blocks of a large file."""
SHARD_ROWS: Final = 2_000_000
"""Approximate rows of the target whose hashes a task has at once; each needs 24 bytes."""
TASK_BYTES: Final = 64 << 20
"""Approximate bytes of data files whose keys a task hashes; it reads only the key columns."""
GROUP_FILES: Final = 64
"""Number of data files whose deletion vectors are in one file."""
_VECTORS: Final = "file int, deleted long, vector string, path string, size long"


@dataclass(frozen=True, slots=True)
class FindableRows:
    """Which rows of a target can be found. By default, all."""

    null_column: str | None = None
    """Column that is null in the rows that can be found; None if there is no such column."""
    ops: tuple[str, ...] = ()
    """Values of `_op`: of each key, only the latest row with one of these values can be found; empty for all rows."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that decide it."""
        names = () if self.null_column is None else (self.null_column,)
        return (*names, *((OP_COLUMN, POSITION_COLUMN, ORDINAL_COLUMN) if self.ops else ()))

    def mask(self, rows: pa.RecordBatch) -> np.ndarray:
        """Return one bool per row: whether it may be found. rows: with the columns `names`."""
        mask = np.ones(rows.num_rows, bool)
        if self.null_column is not None:
            mask &= pc.is_null(rows[self.null_column]).to_numpy(zero_copy_only=False)
        if self.ops:
            mask &= pc.is_in(rows[OP_COLUMN], pa.array(self.ops)).to_numpy(zero_copy_only=False)
        return mask


ALL_ROWS: Final = FindableRows()


@dataclass(frozen=True, slots=True)
class SearchedFile:
    """A live data file of the target. Executors receive pickled instances."""

    path: str
    rows: int | None
    """Number of rows, including deleted ones; None if the statistics do not contain it."""
    vector: Descriptor | None

    def count_rows(self, storage: TableStorage) -> int:
        """Return the number of rows, including deleted ones."""
        if self.rows is not None:
            return self.rows
        with storage.open(self.path) as opened:
            return int(pq.ParquetFile(opened).metadata.num_rows)

    def deleted(self, storage: TableStorage) -> BitMap:
        """Return the numbers of the deleted rows."""
        return BitMap() if self.vector is None else decode(self.vector, storage.read)


@dataclass(frozen=True, slots=True)
class NewVector:
    """The deletion vector of a data file that no commit has added yet."""

    file: int
    """Number of the data file."""
    deleted: int
    """Number of deleted rows."""
    descriptor: Descriptor | None
    """None if all rows of the file are deleted."""
    path: str
    """Path of the file that contains the vector; empty without a descriptor."""
    size: int
    """Size of that file."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Return the vector of a row that `SearchedFiles.write_vectors_of` yields."""
        return cls(row["file"], row["deleted"], json.loads(row["vector"]), row["path"], row["size"])


@dataclass(frozen=True, slots=True)
class SearchedFiles:
    """The live data files of one target. Executors receive pickled instances."""

    uri: str
    files: tuple[SearchedFile, ...]

    @classmethod
    def of(cls, uri: str, files: Iterable[LiveFile]) -> Self:
        """Return the files of the target at `uri`; the numbers of the files are their places in `files`."""
        return cls(uri, tuple(SearchedFile(file.path, file.rows, file.vector) for file in files))

    def write_vectors(self, rows: DataFrame) -> list[NewVector]:
        """Write deletion vectors without some rows of the files. rows: a frame with the columns `file` and `rows`."""
        files = self
        groups = -(-len(self.files) // GROUP_FILES)

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                yield from files.write_vectors_of(_rows_by_file(batches))

        grouped = rows.selectExpr(f"file % {groups} AS grp", "file", "rows").repartitionById(groups, "grp")
        with raising_task_errors():
            return [NewVector.of(row.asDict()) for row in grouped.mapInArrow(write, _VECTORS).collect()]

    def write_vectors_of(self, rows_by_file: dict[int, BitMap]) -> Iterator[pa.RecordBatch]:
        """In a task: add rows to the deletion vectors of files; yield the new vectors, which are in one new file."""
        storage = storage_of(self.uri)
        with reading_files(self.uri):
            deleted = {n: rows | self.files[n].deleted(storage) for n, rows in sorted(rows_by_file.items())}
            whole = {n for n, rows in deleted.items() if len(rows) == self.files[n].count_rows(storage)}
            kept = [number for number in deleted if number not in whole]
            path, content, descriptors = encode([deleted[number] for number in kept])
            if kept:
                storage.write(path, content)
        vectors: dict[int, Descriptor | None] = {**dict.fromkeys(whole), **dict(zip(kept, descriptors, strict=True))}
        for number, descriptor in vectors.items():
            columns = {
                "file": pa.array([number], pa.int32()),
                "deleted": [len(deleted[number])],
                "vector": [json.dumps(descriptor)],
                "path": [path if descriptor else ""],
                "size": [len(content)],
            }
            yield pa.RecordBatch.from_pydict(columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySearch:
    """A search in the files of one target. Executors receive pickled instances."""

    searched: SearchedFiles
    key: StoredColumns
    """How the columns of the wanted keys are made from columns of the target."""
    current: FindableRows = ALL_ROWS
    shards: int
    tasks: int
    """Number of tasks that read the files."""
    secret: bytes
    """The key of the hash function."""

    @classmethod
    def of(cls, uri: str, files: Sequence[LiveFile], key: StoredColumns, current: FindableRows, parts: int) -> Self:
        """Return the search in the files of the target at `uri`. parts: number of parts that have the wanted keys."""
        return cls(
            searched=SearchedFiles.of(uri, files),
            key=key,
            current=current,
            shards=max(parts, -(-sum(file.rows or 0 for file in files) // SHARD_ROWS)),
            tasks=max(parts, -(-sum(file.add["size"] for file in files) // TASK_BYTES)),
            secret=secrets.token_bytes(16),
        )

    def wanted(self, keys: pa.Table, part: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield the hashes of wanted keys of one part as rows of a frame with the columns ENTRIES."""
        hashes, rows = hash_keys([keys[name] for name in self.key.schema.names], self.secret)
        words = [hashes.high, hashes.low, np.full(rows.size, part, np.uint64)]
        yield from self._entries(words, hashes.low, is_stored=False)

    def find(self, session: SparkSession, wanted: DataFrame) -> DataFrame:
        """Return the live rows of the target that have a wanted key, as a frame with the columns FOUND.

        wanted: the frame of the keys, with the columns ENTRIES.
        """
        search, count = self, len(self.searched.files)

        def hash_files(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                for batch in numbers:
                    for number in batch["id"].to_pylist():
                        yield from search.stored(number)

        def match(entries: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for places, parts in _matches(entries, latest=bool(search.current.ops)):
                yield from found_rows(places, parts)

        stored = session.range(0, count, 1, max(1, min(count, self.tasks))).mapInArrow(hash_files, ENTRIES)
        return wanted.unionByName(stored).repartitionById(self.shards, "shard").mapInArrow(match, FOUND)

    def stored(self, number: int) -> Iterator[pa.RecordBatch]:
        """In a task: yield the hashes of the live rows of a data file as rows of a frame with the columns ENTRIES."""
        file, uri, present = self.searched.files[number], self.searched.uri, self.key.present
        with reading_files(uri):
            deleted = rows_of(file.deleted(storage_of(uri)))
        names = dict.fromkeys([*self.key.read_columns.names, *self.current.names])
        columns = pa.schema([present.field(name) for name in names])
        with open_data_file(uri, file.path) as content:
            for group, first in first_rows(content):
                batch = read_group(content, group, columns)
                mask = self.current.mask(batch)
                mask[deleted[(deleted >= first) & (deleted < first + batch.num_rows)] - first] = False
                yield from self._hashed(batch, np.flatnonzero(mask), number, first)

    def _hashed(self, batch: pa.RecordBatch, chosen: np.ndarray, file: int, first: int) -> Iterator[pa.RecordBatch]:
        """Yield the hashes of some rows of a row group. first: number of the first row of the group."""
        batch = batch if chosen.size == batch.num_rows else batch.take(pa.array(chosen))
        keys = self.key.to_rows(batch)
        hashes, rows = hash_keys(keys.columns, self.secret)
        words = [hashes.high, hashes.low, places_of(file, chosen[rows] + first)]
        if self.current.ops:
            order = (pc.fill_null(batch[name], 0).to_numpy() for name in (POSITION_COLUMN, ORDINAL_COLUMN))
            words += [column[rows].astype(np.uint64) for column in order]
        yield from self._entries(words, hashes.low, is_stored=True)

    def _entries(self, words: Sequence[np.ndarray], low: np.ndarray, *, is_stored: bool) -> Iterator[pa.RecordBatch]:
        shards = (low % np.uint64(self.shards)).astype(np.int64)
        for shard, numbers in split_by_part(shards, self.shards):
            if len(numbers):
                chosen = numbers.to_numpy()
                content = np.stack([column[chosen] for column in words]).tobytes()
                yield pa.RecordBatch.from_pydict(
                    {"shard": pa.array([shard], pa.int32()), "stored": [is_stored], "words": [content]}
                )


def found_rows(places: np.ndarray, parts: np.ndarray) -> Iterator[pa.RecordBatch]:
    """Yield rows of data files as rows of a frame with the columns FOUND. parts: the part of each."""
    files, rows = file_and_row(places)
    blocks = rows >> BLOCK_BITS
    groups, group_of = np.unique(np.stack([files, blocks, parts.astype(np.int64)]), axis=1, return_inverse=True)
    for number, chosen in split_by_part(group_of.reshape(-1), groups.shape[1]):
        file, block, part = groups[:, number].tolist()
        columns = {
            "file": pa.array([file], pa.int32()),
            "block": pa.array([block], pa.int32()),
            "part": pa.array([part], pa.int32()),
            "rows": [BitMap(rows[chosen.to_numpy()].astype(np.uint32)).serialize()],
        }
        yield pa.RecordBatch.from_pydict(columns)


def _matches(entries: Iterator[pa.RecordBatch], *, latest: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (places of rows with a wanted key, part of each) from the hashes of one shard.

    latest: only the latest row of each key.
    """
    wanted = [np.zeros((3, 0), np.uint64)]
    stored: list[np.ndarray] = []
    for batch in entries:
        for is_stored, content in zip(batch["stored"].to_pylist(), batch["words"], strict=True):
            words = np.frombuffer(content.as_buffer(), np.uint64)
            if is_stored:
                stored.append(words.reshape(5 if latest else 3, -1))
            else:
                wanted.append(words.reshape(3, -1))
    high, low, part_of = _distinct(np.concatenate(wanted, axis=1))
    if not high.size:
        return
    run = KeyRun.of(KeyHashes(high, low), np.arange(high.size, dtype=np.uint64), ())
    matches = [np.zeros((4, 0), np.uint64)]
    for words in stored:
        numbers, keys = run.find(KeyHashes(words[0], words[1]))
        if latest:
            matches.append(np.concatenate([keys[None], words[2:, numbers]]))
        elif numbers.size:
            yield words[2, numbers], part_of[keys]
    if latest:
        keys, places, position, ordinal = np.concatenate(matches, axis=1)
        order = np.lexsort((ordinal, position, keys))
        last = order[np.append(keys[order][1:] != keys[order][:-1], True)[: order.size]]
        yield places[last], part_of[keys[last]]


def _distinct(words: np.ndarray) -> np.ndarray:
    """Return the columns of an array, sorted, each once."""
    ordered = words[:, np.lexsort(words[::-1])]
    differs = np.append(True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0))[: words.shape[1]]
    return ordered[:, differs]


def _rows_by_file(batches: Iterator[pa.RecordBatch]) -> dict[int, BitMap]:
    rows_by_file: dict[int, BitMap] = defaultdict(BitMap)
    for batch in batches:
        for number, rows in zip(batch["file"].to_pylist(), batch["rows"].to_pylist(), strict=True):
            rows_by_file[number] |= BitMap.deserialize(rows)
    return rows_by_file
