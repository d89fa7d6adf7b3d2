"""The merge of a large batch into a target with history by Spark's executors, which have its changes as folded parts.

A part has every change of its keys. A task gets the changes of a part and the rows of the target that they change,
which executors read from the version of the target before the batch (executor_row_lookup.py). It makes the new rows
with HistoryRowMaker, as the driver does for a small batch. So both ways have the same rows.

An executor writes the new rows of each part to one data file, or to one for each partition. A new row replaces the row
of the target that has its values in `HistoryRows.find_columns`: the task knows where the replaced row is, and executors
delete it by a deletion vector. One commit of the driver adds files and vectors. Where vectors do not fit
(`ExecutorHistory.can_write_files`), Delta's own MERGE finds the rows that new rows replace.

The driver gets names, sizes and statistics of files, and the changes of keys that the target refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from cdc.config.delta_sink import HistoryMode
from pipelines.folding.folded_parts import IMAGES, FoldedParts, first_images, key_texts, piece_of_images
from pipelines.folding.history_changes import GenerationEnd
from pipelines.folding.key_parts import from_ipc
from pipelines.runtime.executor_code import forwarding_errors, raising_task_errors
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.dead_letters import failing_changes
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.executor_files import FILES, PartFiles, add_files, collect_files, folder_of, takes_files
from pipelines.sinks.delta.executor_key_search import (
    ALL_ROWS,
    ENTRIES,
    FindableRows,
    KeySearch,
    NewVector,
    SearchedFiles,
    found_rows,
)
from pipelines.sinks.delta.executor_row_lookup import PLACE, RowLookup, stored_and_images, with_images
from pipelines.sinks.delta.executor_upsert import commit_written, files_to_change, frame_of_batches, write_own_rows
from pipelines.sinks.delta.history_modes import HistoryRows
from pipelines.sinks.delta.history_row_maker import CHANGE_OPS, HistoryRowMaker, changes_to_merge
from pipelines.sinks.delta.history_rows import WithoutBase
from pipelines.sinks.delta.indexed.delta_log import LiveFiles
from pipelines.sinks.delta.indexed.key_hashes import can_hash
from pipelines.sinks.delta.merge_source import key_numbers
from pipelines.sinks.delta.new_data_files import TargetFolder
from pipelines.sinks.delta.spark_target import frame_of, hinted_merge_source, spark_schema
from pipelines.sinks.delta.stored_columns import StoredColumns
from pipelines.sinks.delta.target_columns import OP, RowShape
from pipelines.sinks.delta.target_layout import check_partition_values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_WRITTEN: Final = f"{FILES}, file int, replaced binary"
"""The columns of a frame of written files and replaced rows: in each row, one of both. Replaced rows are the number of
their data file and their numbers in it, as a bitmap.
"""
_FILE_NAMES: Final = ("name", "size", "rows", "statistics", "partition")
_WRITTEN_ROW: Final = pa.schema(
    [
        ("name", pa.string()),
        ("size", pa.int64()),
        ("rows", pa.int64()),
        ("statistics", pa.string()),
        ("partition", pa.string()),
        ("file", pa.int32()),
        ("replaced", pa.binary()),
    ]
)


@dataclass(frozen=True, slots=True)
class PartHistory:
    """What a task needs to make the new rows of a part. Executors receive pickled instances."""

    maker: HistoryRowMaker
    endings: tuple[GenerationEnd, ...]
    since: int
    done: int
    """Position up to which the target has all changes."""

    def changes(self, images: pa.Table) -> pa.Table:
        """Return the changes of a part that the target does not have."""
        return changes_to_merge(images, self.done, self.since)

    def new_rows(self, images: Sequence[pa.Table], stored: Sequence[pa.Table]) -> pa.Table:
        """Return the new rows of a part. images: all its changes. stored: the rows of the target that they change."""
        maker = self.maker
        own = [rows.select(maker.columns.names) for rows in stored]
        before = maker.stored(pa.concat_tables([maker.columns.empty_table(), *own]).combine_chunks())
        rows = maker.new_rows(self.changes(pa.concat_tables(images)), before, self.endings)
        check_partition_values(rows, maker.shape.partition_texts, maker.shape.schema.topic)
        return rows


@dataclass(frozen=True)
class ExecutorHistory:
    """The changes of one batch on the executors, for one target with history."""

    target: DeltaTarget
    parts: FoldedParts
    rows: HistoryRows
    history: PartHistory
    after: int
    """Position that every change of the batch which is not in the target is after."""

    @classmethod
    def of(cls, rows: HistoryRows, batch: TableBatch, done: int) -> ExecutorHistory | None:
        """Create the merge of the batch's changes on the executors; None if there are none. done: as in PartHistory."""
        if batch.parts is None or not batch.parts.table.rows or done >= batch.upto:
            return None
        endings = tuple(sorted(batch.endings))
        history = PartHistory(rows.maker, endings, batch.since, done)
        return cls(rows.target, batch.parts, rows, history, max(done, batch.after))

    @property
    def finds_rows(self) -> bool:
        """Whether new rows may replace rows of the target."""
        return bool(self.rows.find_columns) and self.target.files()[0] > 0

    def can_write_files(self) -> bool:
        """Return whether executors can write the batch with `write_files`.

        If new rows replace rows of the target, they must have every column of the target, and all rows of the target
        must be older than the batch, so that each row with their keys is a state before the batch.
        """
        return self._changed is not None if self.finds_rows else takes_files(self.target)

    def write_files(self, own_rows: pa.Table, marker: TxnMarker) -> None:
        """Write the new rows to data files, and add them to the target in one commit, without the rows they replace.

        own_rows: new rows on the driver, which belong to the batch as well. Raises CommitFailedError if another client
        committed meanwhile.
        """
        from pyspark import StorageLevel

        folder, history = folder_of(self.target), self.history
        find_columns = self.rows.find_columns if self.finds_rows else ()

        def write(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                yield from _written_part(parts, history, folder, find_columns)

        written = self._parts().mapInArrow(write, _WRITTEN).persist(StorageLevel.DISK_ONLY)
        try:
            files = collect_files([written.where("name IS NOT NULL").select(*_FILE_NAMES)])
            files += write_own_rows(folder, own_rows)
            if not find_columns or self._changed is None:
                add_files(self.target, files, marker)
                return
            replaced = written.where("name IS NULL").selectExpr("file", "replaced AS rows")
            vectors = self._write_vectors(replaced, own_rows, self._changed)
        finally:
            written.unpersist()
        commit_written(self.target, self._changed, vectors, files, marker)

    @cached_property
    def _changed(self) -> LiveFiles | None:
        """The live files of a target in which executors can delete rows; None if Delta's MERGE has to be used."""
        rows, target = self.rows, self.target
        if target.metadata.partition_columns:
            return None
        if not takes_files(target) or {*target.columns.names} != {*rows.columns.names} or not rows.shape.key:
            return None
        if not all(can_hash(rows.columns.field(name).type) for name in rows.shape.key):
            return None
        return files_to_change(target, self.after)

    def _write_vectors(self, replaced: DataFrame, own_rows: pa.Table, live: LiveFiles) -> list[NewVector]:
        """Write the vectors that delete the rows which new rows replace. replaced: these rows, without own rows."""
        files = list(live.by_path.values())
        if own_rows.num_rows:
            keys = own_rows.select(list(self.rows.find_columns))
            columns = StoredColumns.of(self.target.columns, keys.schema)
            search = KeySearch.of(self.target.uri, files, columns, ALL_ROWS, self.parts.parts)
            session = self.parts.session
            wanted = frame_of_batches(session, search.wanted(keys), ENTRIES)
            replaced = replaced.unionByName(search.find(session, wanted).select("file", "rows"))
        return SearchedFiles.of(self.target.uri, files).write_vectors(replaced)

    def source(self, own_rows: pa.Table) -> DataFrame:
        """Return the new rows of the batch as a frame, with the column `_op` if they may replace rows of the target.

        own_rows: new rows on the driver, which belong to the batch as well.
        """
        from pyspark.sql import functions as F

        history, columns = self.history, self.rows.columns

        def make(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                if (rows := _new_rows(parts, history)) is not None:
                    yield from rows.to_batches()

        source = self._parts().mapInArrow(make, spark_schema(columns))
        if own_rows.num_rows:
            source = source.unionByName(frame_of(self.parts.session, own_rows))
        if not self.finds_rows:
            return source
        return hinted_merge_source(source.withColumn(OP, F.lit("u")), self.rows.find_columns, self.parts.parts)

    def missing_base(self) -> WithoutBase | None:
        """Return the error for all partial images without a base row; None if every one has a base row."""
        history = self.history

        def count(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                try:
                    _new_rows(parts, history)
                except WithoutBase as exc:
                    yield pa.RecordBatch.from_pydict({"images": [exc.images], "first": [exc.first]})

        with raising_task_errors():
            counted = self._parts().mapInArrow(count, "images long, first long")
            total = counted.selectExpr("sum(images) AS images", "min(first) AS first").first()
        if total is None or not total["images"]:
            return None
        return WithoutBase(self.rows.shape.schema.topic, total["images"], total["first"])

    def _parts(self) -> DataFrame:
        """Return the changes and the rows of the target that they change: a Spark partition for each part."""
        history = self.history

        def needed_keys(images: pa.Table) -> pa.Table:
            return history.maker.stored_keys(history.changes(images))

        images = self.parts.map_pieces(lambda part, rows: iter([piece_of_images(part, rows)]), IMAGES)
        needs_rows = self.rows.mode is not HistoryMode.CHANGES or self.parts.table.incomplete
        if not needs_rows or not self.rows.shape.schema.key or not self.target.files()[0]:
            return with_images(None, images, self.parts.parts)
        stored = self._row_lookup.rows(self.parts, needed_keys, self._search)
        return with_images(stored, images, self.parts.parts)

    @property
    def _row_lookup(self) -> RowLookup:
        """The lookup of the rows from which changes begin: current rows, or the latest changes."""
        rows, present = self.rows, self.target.columns
        ops = CHANGE_OPS if rows.mode is HistoryMode.CHANGES else ()
        return RowLookup(
            uri=self.target.uri,
            version=self.target.version,
            stored=StoredColumns.of(present, rows.columns),
            key=rows.shape.key,
            current=FindableRows(rows.null_column, ops),
        )

    @cached_property
    def _search(self) -> KeySearch | None:
        files = None if self._changed is None else list(self._changed.by_path.values())
        return self._row_lookup.search(self.parts.parts, files)


def can_replace_rows(target: DeltaTarget, columns: pa.Schema, key: tuple[str, ...], after: int) -> bool:
    """Return whether executors can find and replace rows of a target with history, as long as it is not changed.

    columns: all columns that the target has after the batch. after: position that the range of the batch is after.
    """
    if not takes_files(target) or target.metadata.partition_columns or not key:
        return False
    if not {*target.columns.names} <= {*columns.names} or not all(can_hash(columns.field(name).type) for name in key):
        return False
    return files_to_change(target, max(after, target.changed_upto)) is not None


def find_refused_keys(parts: FoldedParts, shape: RowShape, limit: int) -> pa.Table:
    """Return all changes of the keys that have a change which a target with history cannot represent.

    Not many more than `limit` such changes are found. The result also has changes that moved rows from these keys.
    """

    def refused(part: int, images: pa.Table) -> Iterator[pa.RecordBatch]:
        with forwarding_errors():
            failing = sorted(failing_changes(images, shape, limit))
        if failing:
            yield piece_of_images(part, images.take(pa.array(failing, pa.int64())))

    with raising_task_errors():
        changes = first_images(parts.map_pieces(refused, IMAGES), limit)
        if not changes.num_rows:
            return changes
        rows, _ = parts.split_off(key_texts(changes["key"]).unique().to_pylist())
    return rows


def _new_rows(batches: Iterator[pa.RecordBatch], history: PartHistory) -> pa.Table | None:
    """Return the new rows of a part; None if there are no changes. batches: with the columns PART_ROWS."""
    stored, images = stored_and_images(batches)
    return history.new_rows([from_ipc(stream) for stream in images], stored) if images else None


def _written_part(
    batches: Iterator[pa.RecordBatch], history: PartHistory, folder: TargetFolder, find_columns: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """In a task: write the new rows of a part; yield the file, and the rows of the target that they replace."""
    stored, images = stored_and_images(batches)
    if not images:
        return
    rows, file = history.new_rows([from_ipc(stream) for stream in images], stored), PartFiles(folder)
    file.add(rows)
    for batch in file.close():
        yield pa.RecordBatch.from_pylist(batch.to_pylist(), _WRITTEN_ROW)
    if not find_columns or not stored:
        return
    before = pa.concat_tables(stored).select([*find_columns, PLACE])
    numbers = key_numbers(pa.concat_tables([rows.select(find_columns), before.select(find_columns)]))
    is_replaced = np.isin(numbers[rows.num_rows :], numbers[: rows.num_rows])
    places = before[PLACE].to_numpy()[is_replaced]
    for found in found_rows(places, np.zeros(places.size, np.int64)):
        columns = {"file": found["file"], "replaced": found["rows"]}
        yield pa.RecordBatch.from_pydict(
            {field.name: columns.get(field.name, pa.nulls(1, field.type)) for field in _WRITTEN_ROW}
        )
