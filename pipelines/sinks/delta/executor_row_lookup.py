"""Row lookup by executors: they read the rows of a target that the images of a batch need, for the parts of the images.

A key search finds the rows in the data files of one version of the target. Tasks read them from the files, and hand
them to the parts as Arrow IPC streams. No value passes through a JVM. Spark's own join takes the targets whose data
files tasks cannot read or search: those with unknown table features, and those partitioned by a column that is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from pyroaring import BitMap

from cdc.delta_protocol.deletion_vectors import rows_of
from cdc.delta_protocol.table_storage import storage_of
from cdc.target_names import OP_COLUMN, ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN
from pipelines.folding.folded_parts import FoldedParts
from pipelines.folding.key_parts import from_ipc, split_by_part, to_ipc
from pipelines.runtime.executor_code import forwarding_errors
from pipelines.sinks.delta.damage_errors import reading_files
from pipelines.sinks.delta.executor_key_search import ALL_ROWS, ENTRIES, FindableRows, KeySearch, SearchedFiles
from pipelines.sinks.delta.indexed.delta_log import LiveFile, LiveFiles, LogNotReadable
from pipelines.sinks.delta.indexed.key_hashes import can_hash
from pipelines.sinks.delta.indexed.key_index import places_of
from pipelines.sinks.delta.indexed_writer import FEATURES
from pipelines.sinks.delta.spark_target import SORTED_JOIN, frame_at, spark_schema
from pipelines.sinks.delta.stored_columns import StoredColumns, first_rows, open_data_file
from pipelines.sinks.delta.target_layout import backticked

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART_ROWS: Final = "part int, stored binary, images binary"
"""The columns of a frame of stored rows and images: number of the part, and one of the two as an Arrow IPC stream."""
PLACE: Final = "_place"
"""Column of stored rows that a key search found: the number of the data file and of the row in it, as `places_of`."""
HANDED_ROWS: Final = 65_536
"""Approximate number of rows that a reading task hands to the parts at once."""
_PART: Final = "_part"
_KEY: Final = "_key"

KeysOf = Callable[[pa.Table], pa.Table]
"""Function (images) → typed keys of the rows that these images need."""


@dataclass(frozen=True, slots=True)
class RowLookup:
    """The lookup of rows in one version of a target."""

    uri: str
    version: int
    stored: StoredColumns
    """The columns of the target at this version, and those of the rows to return."""
    key: tuple[str, ...]
    """The key columns of the rows to return."""
    current: FindableRows = ALL_ROWS
    relation: int | None = None
    """The relation whose rows are read in a shared target; None if all rows are read."""

    def live_files(self) -> list[LiveFile] | None:
        """Return the data files with the rows, without their deletion vectors; None if tasks cannot read them."""
        try:
            with reading_files(self.uri):
                files = LiveFiles.read(storage_of(self.uri), self.version, with_vectors=False)
        except LogNotReadable:
            return None
        if not is_readable(files) or not {*self.stored.names.values()}.isdisjoint(files.partition_columns):
            return None
        return [file for file in files.by_path.values() if self._is_own(file)]

    def search(self, parts: int, files: Sequence[LiveFile] | None = None) -> KeySearch | None:
        """Return the search for the keys of so many parts; None if Spark has to join.

        files: the data files, if the caller has read them.
        """
        key = self.stored.only(self.key)
        if not all(can_hash(field.type) for field in key.schema):
            return None
        if files is None and (files := self.live_files()) is None:
            return None
        return KeySearch.of(self.uri, files, key, self.current, parts)

    def rows(self, parts: FoldedParts, keys_of: KeysOf, search: KeySearch | None) -> DataFrame:
        """Return the rows that the images of the parts need, as a frame with the columns PART_ROWS.

        search: the result of `search`. The rows that it finds also have the column PLACE.
        """
        if search is None:
            return self._joined(parts, keys_of)

        def hash_keys_of(part: int, images: pa.Table) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                yield from search.wanted(keys_of(images), part)

        found = search.find(parts.session, parts.map_pieces(hash_keys_of, ENTRIES))
        files, stored, tasks, count = search.searched, self.stored, max(search.tasks, parts.parts), parts.parts

        def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                yield from _handed(_read_rows(batches, files, stored), count)

        found = found.selectExpr(f"(file + block) % {tasks} AS grp", "file", "part", "rows")
        return found.repartitionById(tasks, "grp").mapInArrow(read, PART_ROWS)

    def _is_own(self, file: LiveFile) -> bool:
        values = file.add.get("partitionValues") or {}
        return self.relation is None or values.get(RELATION_COLUMN) == str(int(self.relation))

    def _joined(self, parts: FoldedParts, keys_of: KeysOf) -> DataFrame:
        """Return what `rows` returns, without PLACE, by a join of Spark."""
        names, count, stored = self.stored.names, parts.parts, self.stored
        if not {*self.key} <= {*names}:  # the target's key has another type, so that no row has a wanted key
            return parts.session.createDataFrame([], PART_ROWS)
        key = [names[name] for name in self.key]
        fields = [pa.field(f"{_KEY}{n}", field.type) for n, field in enumerate(stored.only(self.key).schema)]
        key_schema = pa.schema([*fields, pa.field(_PART, pa.int32())])

        def keys(part: int, images: pa.Table) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                typed = keys_of(images)
            columns = [*typed.columns, pa.repeat(pa.scalar(part, pa.int32()), typed.num_rows)]
            yield from pa.table(columns, schema=key_schema).to_batches()

        def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                part_of = batch[_PART].to_numpy().astype(np.int64)
                yield from _pieces(stored.to_rows(batch), part_of, count)

        needed = parts.map_pieces(keys, spark_schema(key_schema))
        # with explicit partitions, because a session on one machine shuffles into two
        needed = needed.distinct().repartition(count, *(field.name for field in fields))
        rows = self._current_rows(parts).repartition(count, *map(backticked, key))
        same = [rows[backticked(name)] == needed[f"{_KEY}{n}"] for n, name in enumerate(key)]
        joined = rows.join(needed.hint(SORTED_JOIN), same)
        joined = joined.select(*(rows[backticked(name)] for name in rows.columns), needed[_PART])
        if self.current.ops:
            joined = _latest_per_key(joined, key)
        return joined.mapInArrow(pack, PART_ROWS)

    def _current_rows(self, parts: FoldedParts) -> DataFrame:
        """Return the needed columns of the rows that can be found; of each key, more than the latest one."""
        rows = frame_at(parts.session, self.uri, self.version, () if self.relation is None else (self.relation,))
        if self.current.null_column is not None:
            rows = rows.where(rows[self.current.null_column].isNull())
        if self.current.ops:
            rows = rows.where(rows[OP_COLUMN].isin(*self.current.ops))
        names = dict.fromkeys([*self.stored.read_columns.names, *self.current.names])
        return rows.select(*(rows[backticked(name)] for name in names))


def with_images(stored: DataFrame | None, images: DataFrame, parts: int) -> DataFrame:
    """Return stored rows and images as a frame with the columns PART_ROWS: a Spark partition for each part.

    stored: the result of `RowLookup.rows`; None for no rows, the images then stay in their Spark partitions. images: a
    frame with the columns IMAGES.
    """
    from pyspark.sql import functions as F

    pieces = images.select("part", F.lit(None).cast("binary").alias("stored"), "images")
    return pieces if stored is None else pieces.unionByName(stored).repartitionById(parts, "part")


def stored_and_images(batches: Iterator[pa.RecordBatch]) -> tuple[list[pa.Table], list[pa.Buffer]]:
    """In a task: return the stored rows and the images of a part; the images as streams. batches: as PART_ROWS."""
    stored: list[pa.Table] = []
    images: list[pa.Buffer] = []
    for batch in batches:
        stored += [from_ipc(stream.as_buffer()) for stream in batch["stored"] if stream.is_valid]
        images += [stream.as_buffer() for stream in batch["images"] if stream.is_valid]
    return stored, images


def is_readable(files: LiveFiles) -> bool:
    """Return whether tasks can read the data files of a table: no table feature changes what the files mean."""
    readable = {*(files.protocol.get("readerFeatures") or ())} <= FEATURES
    return readable and files.protocol.get("minReaderVersion") in {1, 3}


def _read_rows(
    found: Iterator[pa.RecordBatch], files: SearchedFiles, stored: StoredColumns
) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """In a task: yield (rows of a row group, part of each). found: with the columns `file`, `part` and `rows`."""
    rows_of_file: dict[int, list[tuple[int, BitMap]]] = defaultdict(list)
    for batch in found:
        for file, part, rows in zip(*(batch[name].to_pylist() for name in ("file", "part", "rows")), strict=True):
            rows_of_file[file].append((part, BitMap.deserialize(rows)))
    for file, rows_of_parts in sorted(rows_of_file.items()):
        numbers = np.concatenate([rows_of(rows) for _, rows in rows_of_parts]).astype(np.int64)
        part_of = np.concatenate([np.full(len(rows), part, np.int64) for part, rows in rows_of_parts])
        order = np.argsort(numbers, kind="stable")
        numbers, part_of = numbers[order], part_of[order]
        with open_data_file(files.uri, files.files[file].path) as content:
            for group, first in first_rows(content):
                start, end = np.searchsorted(numbers, [first, first + content.metadata.row_group(group).num_rows])
                if start < end:
                    chosen = numbers[start:end]
                    rows = stored.rows_of_group(content, group).take(pa.array(chosen - first))
                    yield rows.append_column(PLACE, pa.array(places_of(file, chosen))), part_of[start:end]


def _handed(read: Iterator[tuple[pa.Table, np.ndarray]], parts: int) -> Iterator[pa.RecordBatch]:
    """Divide rows by part, about HANDED_ROWS at once: a part may need few rows of a row group."""
    tables: list[pa.Table] = []
    part_of: list[np.ndarray] = []
    count = 0
    for rows, part_of_rows in read:
        tables.append(rows)
        part_of.append(part_of_rows)
        count += rows.num_rows
        if count >= HANDED_ROWS:
            yield from _pieces(pa.concat_tables(tables), np.concatenate(part_of), parts)
            tables, part_of, count = [], [], 0
    if tables:
        yield from _pieces(pa.concat_tables(tables), np.concatenate(part_of), parts)


def _pieces(rows: pa.Table, part_of: np.ndarray, parts: int) -> Iterator[pa.RecordBatch]:
    for part, numbers in split_by_part(part_of, parts):
        if len(numbers):
            columns = {"part": pa.array([part], pa.int32()), "stored": [to_ipc(rows.take(numbers))]}
            yield pa.RecordBatch.from_pydict({**columns, "images": pa.nulls(1, pa.binary())})


def _latest_per_key(rows: DataFrame, key: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions as F

    row = F.struct(*(F.col(backticked(name)) for name in rows.columns))
    latest = F.max_by(row, F.struct(POSITION_COLUMN, ORDINAL_COLUMN)).alias("row")
    return rows.groupBy(*(F.col(backticked(name)) for name in key), F.col(_PART)).agg(latest).select("row.*")
