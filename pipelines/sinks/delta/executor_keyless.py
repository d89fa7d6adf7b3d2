"""The merge of a large batch of a table without a key by Spark's executors, whose rows are counted by their values.

1. Executors divide added and deleted rows by a hash of their values. So equal rows are in one task, which cancels them
   out with `net_changes`, as for a small batch.
2. For each remaining delete, `executor_row_search.py` finds an equal row of the target: its position and ordinal.
3. Executors write the added rows to new files, and delete the found rows with deletion vectors. The driver commits both
   at once. Delta's MERGE does this for a target in which executors cannot write files.

A batch without deletes is appended. The driver gets numbers of rows, and names, sizes and statistics of files.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import MissingBase, ValueNotRepresentable
from cdc.position import Position
from pipelines.folding.folded_parts import IMAGES, FoldedParts, Piece, piece_of_images
from pipelines.folding.key_parts import from_ipc, split_by_part
from pipelines.folding.keyless_fold import image_texts, net_changes
from pipelines.runtime.executor_code import forwarding_errors, raising_task_errors
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.executor_files import FILES, PartFiles, add_files, collect_files, folder_of, takes_files
from pipelines.sinks.delta.executor_key_search import ENTRIES, TASK_BYTES, NewVector
from pipelines.sinks.delta.executor_row_search import (
    HASHES,
    SHARD_ROWS,
    DeletableRows,
    RowSearch,
    StoredFile,
    places_in,
)
from pipelines.sinks.delta.executor_upsert import commit_written, search_in, writable_files
from pipelines.sinks.delta.indexed.delta_log import LiveFile
from pipelines.sinks.delta.indexed.key_hashes import hash_keys
from pipelines.sinks.delta.merge_source import as_upserts, keyless_delete_rows, missing_rows
from pipelines.sinks.delta.new_data_files import DataFile
from pipelines.sinks.delta.schema_evolution import read_plan
from pipelines.sinks.delta.settings import Writer
from pipelines.sinks.delta.spark_target import frame_at, hinted_merge_source, spark_schema
from pipelines.sinks.delta.stored_columns import StoredColumns
from pipelines.sinks.delta.target_columns import POSITION_KEY, RowShape
from pipelines.sinks.delta.target_layout import backticked, check_partition_values
from pipelines.sinks.delta.writers import Writers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_DIVIDING: Final = bytes(16)
"""Key of the hash function that divides images into parts."""


@dataclass
class KeylessMerge:
    """The rows of one batch on the executors, for the target of a table without a key, until `release`."""

    target: DeltaTarget
    parts: FoldedParts
    """The rows that the target does not have yet."""
    shape: RowShape
    truncated: tuple[int, int] | None
    """(position, ordinal) of a truncate in the range; a delete does not match rows older than it."""
    is_lenient: bool
    """Whether a delete is ignored if its row is missing in the target."""
    _stored: list[DataFrame] = field(default_factory=list, init=False, repr=False)

    def find_deletes(self) -> None:
        """Find the rows to delete in the present version of the target, before the merge changes it.

        Raises MissingBase if the target has too few equal rows, unless the merge is lenient; ValueNotRepresentable for
        a value that does not fit its column. As in a small batch, one of an added row is reported first.
        """
        if not self.has_deletes:
            return
        try:
            with raising_task_errors():
                total = self._found.selectExpr("sum(missing) AS missing", "min(first) AS first").first()
            if total is not None and total["missing"] and not self.is_lenient:
                raise missing_rows(self.shape.schema.topic, total["missing"], Position(total["first"]))
        except (ValueNotRepresentable, MissingBase):
            self._check_added()
            raise

    def write(self, marker: TxnMarker, writers: Writers) -> None:
        """Write the batch in one commit with the `txn` of `marker`, after `find_deletes`.

        Raises CommitFailedError if another client committed meanwhile.
        """
        live = writable_files(self.target) if takes_files(self.target) else None
        with raising_task_errors():
            if live is None:
                self._merge_by_spark(marker, writers)
            elif self.has_deletes:
                files = list(live.by_path.values())
                commit_written(self.target, live, self._write_vectors(files), self._write_files(), marker)
            else:
                add_files(self.target, self._write_files(), marker)

    def release(self) -> None:
        """Let the executors remove what they stored."""
        while self._stored:
            self._stored.pop().unpersist()

    @cached_property
    def has_deletes(self) -> bool:
        """Whether the batch deletes rows; the first access runs a Spark job."""
        return self.parts.has_any(lambda rows: bool(pc.any(pc.equal(rows["op"], "d"), min_count=0).as_py()))

    @cached_property
    def _net(self) -> DataFrame:
        """The folded rows that do not cancel out, as a frame with the columns IMAGES."""
        shape, parts = self.shape, self.parts.parts

        def divide(_: int, images: pa.Table) -> Iterator[pa.RecordBatch]:
            hashes, _rows = hash_keys([image_texts(images, shape.schema)], _DIVIDING)
            for part, numbers in split_by_part((hashes.low % np.uint64(parts)).astype(np.int64), parts):
                if len(numbers):
                    yield piece_of_images(part, images.take(numbers))

        def cancel_out(pieces: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            images = list(_tables(pieces))
            if images:
                yield piece_of_images(0, net_changes(pa.concat_tables(images), shape.schema))

        divided = self.parts.map_pieces(divide, IMAGES)
        return self._store(divided.repartitionById(parts, "part").mapInArrow(cancel_out, IMAGES))

    @cached_property
    def _found(self) -> DataFrame:
        """The rows of the target to delete, as a frame with the columns `executor_row_search.FOUND`."""
        shape, session = self.shape, self.parts.session
        names = tuple(name for name in shape.columns.names if name not in POSITION_KEY)
        live = writable_files(self.target) if takes_files(self.target) else None
        shards = max(self.parts.parts, -(-self._target_rows // SHARD_ROWS))
        search = RowSearch(columns=names, shards=shards, secret=secrets.token_bytes(16))

        def hash_deleted(pieces: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                for images in _tables(pieces):
                    deleted = images.filter(pc.equal(images["op"], "d"))
                    yield from search.hashes(shape.rows(deleted), is_stored=False)

        stored = DeletableRows(
            uri=self.target.uri,
            stored=StoredColumns(self.target.columns, read_plan(self.target.columns, shape.columns)),
            files=() if live is None else tuple(map(StoredFile.of, live.by_path.values())),
            truncated=self.truncated,
        )
        if live is None:
            hashes = self._hashes_by_spark(stored, search)
        else:
            size = sum(file.add["size"] for file in live.by_path.values())
            hashes = stored.hashes(session, search, max(self.parts.parts, -(-size // TASK_BYTES)))
        return self._store(search.find(self._net.mapInArrow(hash_deleted, HASHES), hashes))

    @property
    def _target_rows(self) -> int:
        """Number of rows in the files of the target, as far as their statistics contain it."""
        return (pc.sum(self.target.actions["num_records"]).as_py() or 0) if self.target.files()[0] else 0

    def _hashes_by_spark(self, stored: DeletableRows, search: RowSearch) -> DataFrame:
        """Return the hashes of the rows of a target whose files only Spark can read."""

        def hash_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                for batch in batches:
                    yield from stored.hashes_of(batch, search)

        rows = frame_at(self.parts.session, self.target.uri, self.target.version)
        return rows.select(*map(backticked, stored.read_columns.names)).mapInArrow(hash_rows, HASHES)

    def _write_files(self) -> list[DataFile]:
        """Let executors write the added rows to data files that no commit has added yet."""
        folder, shape = folder_of(self.target), self.shape

        def write(images: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                file = PartFiles(folder)
                for piece in images:
                    file.add(_added_rows(piece, shape))
                yield from file.close()

        def write_parts(pieces: Iterator[Piece]) -> Iterator[pa.RecordBatch]:
            yield from write(images for _, images in pieces)

        def write_net(pieces: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from write(_tables(pieces))

        if self.has_deletes:
            return collect_files([self._net.mapInArrow(write_net, FILES)])
        return collect_files([self.parts.map_parts(write_parts, FILES)])

    def _check_added(self) -> None:
        """Raise the error of an added row that cannot be written, if there is one."""
        shape = self.shape

        def check(pieces: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                rows = sum(_added_rows(piece, shape).num_rows for piece in _tables(pieces))
                yield pa.RecordBatch.from_pydict({"rows": [rows]})

        with raising_task_errors():
            self._net.mapInArrow(check, "rows long").selectExpr("sum(rows)").first()

    def _write_vectors(self, files: list[LiveFile]) -> list[NewVector]:
        """Let executors write deletion vectors without the rows to delete. files: the live files of the target."""
        if not files:
            return []
        search = search_in(self.target, POSITION_KEY, files, self.parts.parts)

        def hash_places(results: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in results:
                for places in places_in(batch):
                    yield from search.wanted(places)

        wanted = self._found.mapInArrow(hash_places, ENTRIES)
        return search.searched.write_vectors(search.find(self.parts.session, wanted))

    def _merge_by_spark(self, marker: TxnMarker, writers: Writers) -> None:
        """Let Spark append the added rows, or merge them with the deletes."""
        shape = self.shape

        def add(_: int, images: pa.Table) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                yield from _added_rows(images, shape).to_batches()

        if not self.has_deletes:
            rows = self.parts.map_pieces(add, spark_schema(shape.columns))
            writers.merge(self.target, rows, (), marker, Writer.SPARK)
            return

        def add_net(pieces: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                for images in _tables(pieces):
                    yield from as_upserts(_added_rows(images, shape), shape).to_batches()

        def delete(results: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in results:
                for places in places_in(batch):
                    yield from keyless_delete_rows(places, shape).to_batches()

        columns = spark_schema(shape.source)
        source = self._net.mapInArrow(add_net, columns).unionByName(self._found.mapInArrow(delete, columns))
        if self.target.files()[0]:
            source = hinted_merge_source(source, POSITION_KEY, self.parts.parts)
        writers.merge(self.target, source, POSITION_KEY, marker, Writer.SPARK)

    def _store(self, frame: DataFrame) -> DataFrame:
        """Let executors store a frame, which several jobs read, on their disks."""
        from pyspark import StorageLevel

        self._stored.append(frame.persist(StorageLevel.DISK_ONLY))
        return self._stored[-1]


def _added_rows(images: pa.Table, shape: RowShape) -> pa.Table:
    """Return the added rows among folded rows as rows of the target."""
    rows = shape.rows(images.filter(pc.equal(images["op"], "u")))
    check_partition_values(rows, shape.partition_texts, shape.schema.topic)
    return rows


def _tables(pieces: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the folded rows of pieces. pieces: with the columns IMAGES."""
    for batch in pieces:
        for stream in batch["images"]:
            yield from_ipc(stream.as_buffer())
