"""Key search by executors: they find the old rows of a large batch in a target, and write the vectors that delete them.

1. Tasks hash the keys of the batch and of the target's data files, and divide the hashes into shards.
2. A task for each shard compares the hashes. It finds the numbers of the old rows in each file.
3. A task for each group of files adds these numbers to the deletion vectors of the files. It writes the new vectors.

Only the key columns of the target are read. No value passes through a JVM. The driver gets a short entry for each file
with old rows. The hashes are those of the key index, see `key_hashes.py`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap

from pipelines.folding.key_parts import split_by_part
from pipelines.runtime.executor_code import forwarding_errors, raising_task_errors
from pipelines.sinks.delta.damage_errors import reading_files
from pipelines.sinks.delta.indexed.deletion_vectors import Descriptor, decode, encode
from pipelines.sinks.delta.indexed.key_hashes import hash_keys
from pipelines.sinks.delta.indexed.key_index import KeyHashes, KeyRun, file_and_row, places_of
from pipelines.sinks.delta.indexed.table_storage import TableStorage, plain_schema, storage_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ENTRIES: Final = "shard int, places boolean, words binary"
"""The columns of a frame of hashes: number of the shard, whether the hashes have places, and the 64-bit words."""
SHARD_ROWS: Final = 2_000_000
"""Approximate rows of the target whose hashes a task has at once; each needs 24 bytes."""
TASK_BYTES: Final = 64 << 20
"""Approximate bytes of data files whose keys a task hashes; it reads only the key columns."""
GROUP_FILES: Final = 64
"""Number of data files whose deletion vectors are in one file."""
_OLD_ROWS: Final = "grp int, file int, rows binary"
_VECTORS: Final = "file int, deleted long, vector string, path string, size long"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySearch:
    """A search in the files of one target. Executors receive pickled instances."""

    uri: str
    key: tuple[str, ...]
    """The key columns of the target."""
    files: tuple[SearchedFile, ...]
    shards: int
    tasks: int
    """Number of tasks that hash the keys of the files."""
    secret: bytes
    """The key of the hash function."""

    def entries(self, keys: Sequence[pa.Array | pa.ChunkedArray], file: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the hashes of keys as rows of a frame with the columns ENTRIES.

        keys: the key columns. file: number of the data file that contains the keys, row by row; None for a batch.
        """
        hashes, rows = hash_keys(keys, self.secret)
        words = [hashes.high, hashes.low] if file is None else [hashes.high, hashes.low, places_of(file, rows)]
        shards = (hashes.low % np.uint64(self.shards)).astype(np.int64)
        for shard, numbers in split_by_part(shards, self.shards):
            if len(numbers):
                chosen = numbers.to_numpy()
                content = np.stack([column[chosen] for column in words]).tobytes()
                yield pa.RecordBatch.from_pydict(
                    {"shard": pa.array([shard], pa.int32()), "places": [file is not None], "words": [content]}
                )

    def write_vectors(self, session: SparkSession, wanted: DataFrame) -> list[NewVector]:
        """Write deletion vectors without the rows of the target that have a wanted key.

        wanted: the frame of the keys, with the columns ENTRIES.
        """
        search = self
        groups = -(-len(self.files) // GROUP_FILES)

        def hash_files(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                for batch in numbers:
                    for number in batch["id"].to_pylist():
                        yield from search.entries(search.read_keys(number), number)

        def match(entries: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for file, rows in _old_rows(entries):
                columns = {"grp": pa.array([file % groups], pa.int32()), "file": pa.array([file], pa.int32())}
                yield pa.RecordBatch.from_pydict({**columns, "rows": [rows.serialize()]})

        def write(old_rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                yield from search.write_vectors_of(_rows_by_file(old_rows))

        stored = session.range(0, len(self.files), 1, self.tasks).mapInArrow(hash_files, ENTRIES)
        old_rows = wanted.unionByName(stored).repartitionById(self.shards, "shard").mapInArrow(match, _OLD_ROWS)
        vectors = old_rows.repartitionById(groups, "grp").mapInArrow(write, _VECTORS)
        with raising_task_errors():
            return [
                NewVector(row["file"], row["deleted"], json.loads(row["vector"]), row["path"], row["size"])
                for row in vectors.collect()
            ]

    def read_keys(self, number: int) -> list[pa.ChunkedArray]:
        """Return the key columns of a data file, including deleted rows."""
        with reading_files(self.uri), storage_of(self.uri).open(self.files[number].path) as opened:
            rows = pq.ParquetFile(opened, coerce_int96_timestamp_unit="us").read(columns=list(self.key))
            rows = rows.cast(plain_schema(rows.schema))
        return [rows[name] for name in self.key]

    def write_vectors_of(self, rows_by_file: dict[int, BitMap]) -> Iterator[pa.RecordBatch]:
        """In a task: add rows to the deletion vectors of files; yield the new vectors, which are in one new file."""
        storage = storage_of(self.uri)
        with reading_files(self.uri):
            deleted = {number: rows | self._deleted(number, storage) for number, rows in sorted(rows_by_file.items())}
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

    def _deleted(self, number: int, storage: TableStorage) -> BitMap:
        vector = self.files[number].vector
        return BitMap() if vector is None else decode(vector, storage.read)


def _old_rows(entries: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, BitMap]]:
    """Yield (number of a data file, its rows with a wanted key) from the hashes of one shard."""
    wanted = [np.zeros((2, 0), np.uint64)]
    stored: list[np.ndarray] = []
    for batch in entries:
        for has_places, content in zip(batch["places"].to_pylist(), batch["words"], strict=True):
            words = np.frombuffer(content.as_buffer(), np.uint64)
            if has_places:
                stored.append(words.reshape(3, -1))
            else:
                wanted.append(words.reshape(2, -1))
    high, low = np.concatenate(wanted, axis=1)
    run = KeyRun.of(KeyHashes(high, low), np.zeros(high.size, np.uint64), ())
    if not run.size:
        return
    for high, low, places in stored:
        numbers, _ = run.find(KeyHashes(high, low))
        files, rows = file_and_row(places[numbers])
        for file in np.unique(files).tolist():
            yield file, BitMap(rows[files == file].astype(np.uint32))


def _rows_by_file(old_rows: Iterator[pa.RecordBatch]) -> dict[int, BitMap]:
    found: dict[int, BitMap] = defaultdict(BitMap)
    for batch in old_rows:
        for number, rows in zip(batch["file"].to_pylist(), batch["rows"].to_pylist(), strict=True):
            found[number] |= BitMap.deserialize(rows)
    return found
