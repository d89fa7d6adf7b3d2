"""The merge of a large batch into a target with history by Spark's executors, which have its changes as folded parts.

A part has every change of its keys. A task gets the changes of a part and the rows of the target that they change,
which a join reads from the version of the target before the batch. It makes the new rows with HistoryRowMaker, as the
driver does for a small batch. So both ways have the same rows.

- **Rows that are only added** (mode `changes`, and an empty target): each part becomes one data file, which an executor
  writes (one file for each partition), and one commit of the driver adds the files.
- **Other rows**: Delta's own MERGE finds the rows that new rows replace.

The driver gets names, sizes and statistics of files, and the changes of keys that the target refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from cdc.config.sinks import HistoryMode
from cdc.target_names import OP_COLUMN, ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.folding.folded_parts import IMAGES, FoldedParts, first_images, key_texts, piece_of_images
from pipelines.folding.history_changes import GenerationEnd
from pipelines.folding.key_parts import from_ipc, split_by_part, to_ipc
from pipelines.runtime.executor_code import forwarding_errors, raising_task_errors
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.dead_letters import failing_changes
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.executor_files import FILES, PartFiles, add_files, collect_files, folder_of, takes_files
from pipelines.sinks.delta.executor_merge import StoredColumns
from pipelines.sinks.delta.history_modes import HistoryRows
from pipelines.sinks.delta.history_row_maker import CHANGE_OPS, HistoryRowMaker, changes_to_merge
from pipelines.sinks.delta.history_rows import WithoutBase
from pipelines.sinks.delta.schema_evolution import read_plan
from pipelines.sinks.delta.spark_target import SORTED_JOIN, frame_at, frame_of, hinted_merge_source, spark_schema
from pipelines.sinks.delta.target_columns import OP, RowShape
from pipelines.sinks.delta.target_layout import backticked, check_partition_values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PART: Final = "_part"
_KEY: Final = "_key"
_TASK_ROWS: Final = "part int, stored binary, images binary"


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
        before = maker.stored(pa.concat_tables([maker.columns.empty_table(), *stored]).combine_chunks())
        rows = maker.new_rows(self.changes(pa.concat_tables(images)), before, self.endings)
        check_partition_values(rows, maker.shape.partition_texts, maker.shape.schema.topic)
        return rows


@dataclass(frozen=True, slots=True)
class ExecutorHistory:
    """The changes of one batch on the executors, for one target with history."""

    target: DeltaTarget
    parts: FoldedParts
    rows: HistoryRows
    history: PartHistory

    @classmethod
    def of(cls, rows: HistoryRows, batch: TableBatch, done: int) -> ExecutorHistory | None:
        """Create the merge of the batch's changes on the executors; None if there are none. done: as in PartHistory."""
        if batch.parts is None or not batch.parts.table.rows or done >= batch.upto:
            return None
        endings = tuple(sorted(batch.endings))
        return cls(rows.target, batch.parts, rows, PartHistory(rows.maker, endings, batch.since, done))

    @property
    def finds_rows(self) -> bool:
        """Whether new rows may replace rows of the target."""
        return bool(self.rows.find_columns) and self.target.files()[0] > 0

    def can_write_files(self) -> bool:
        """Return whether executors can write data files for `write_files`."""
        return not self.finds_rows and takes_files(self.target)

    def write_files(self, marker: TxnMarker) -> None:
        """Write the new rows to data files, and add them to the target in one commit."""
        folder, history = folder_of(self.target), self.history

        def write(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                file = PartFiles(folder)
                if (rows := _new_rows(parts, history)) is not None:
                    file.add(rows)
                yield from file.close()

        add_files(self.target, collect_files([self._parts().mapInArrow(write, FILES)]), marker)

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
        from pyspark.sql import functions as F

        changes = self.parts.map_pieces(_piece_of_changes, _TASK_ROWS)
        if not self.rows.shape.schema.key or not self.target.files()[0]:
            return changes
        if self.rows.mode is HistoryMode.CHANGES and not self.parts.table.incomplete:
            return changes
        stored = self._stored_rows().select("part", "stored", F.lit(None).cast("binary").alias("images"))
        return changes.unionByName(stored).repartitionById(self.parts.parts, "part")

    def _stored_rows(self) -> DataFrame:
        """Return the rows of the target that the changes depend on, each with the part of its key."""
        history, shape = self.history, self.rows.shape
        parts, present = self.parts.parts, self.target.columns
        stored = StoredColumns(present, read_plan(present, self.rows.columns))
        key = [stored.names[name] for name in shape.key]
        key_fields = [pa.field(f"{_KEY}{n}", shape.image_columns.field(name).type) for n, name in enumerate(shape.key)]
        key_schema = pa.schema([*key_fields, pa.field(_PART, pa.int32())])

        def keys(part: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                typed = history.maker.stored_keys(history.changes(rows))
            columns = [*typed.columns, pa.repeat(pa.scalar(part, pa.int32()), typed.num_rows)]
            yield from pa.table(columns, schema=key_schema).to_batches()

        def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                part_of = batch[_PART].to_numpy().astype(np.int64)
                rows = stored.to_rows(batch)
                for part, numbers in split_by_part(part_of, parts):
                    if len(numbers):
                        yield _piece_of_stored(part, rows.take(numbers))

        needed = self.parts.map_pieces(keys, spark_schema(key_schema))
        # with explicit partitions, because a session on one machine shuffles into two
        needed = needed.distinct().repartition(parts, *(field.name for field in key_fields))
        rows = self._current_rows(list(dict.fromkeys(stored.names.values())))
        rows = rows.repartition(parts, *map(backticked, key))
        same = [rows[backticked(name)] == needed[f"{_KEY}{n}"] for n, name in enumerate(key)]
        joined = rows.join(needed.hint(SORTED_JOIN), same)
        joined = joined.select(*(rows[backticked(name)] for name in rows.columns), needed[_PART])
        if self.rows.mode is HistoryMode.CHANGES:
            joined = _latest_per_key(joined, key)
        return joined.mapInArrow(pack, _TASK_ROWS)

    def _current_rows(self, names: Sequence[str]) -> DataFrame:
        """Return some columns of the rows of the target from which changes begin: current rows, or all changes."""
        rows = frame_at(self.parts.session, self.target.uri, self.target.version)
        if self.rows.null_column is not None:
            rows = rows.where(rows[self.rows.null_column].isNull())
        if self.rows.mode is HistoryMode.CHANGES:
            rows = rows.where(rows[OP_COLUMN].isin(*CHANGE_OPS))
        return rows.select(*(rows[backticked(name)] for name in names))


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


def _latest_per_key(rows: DataFrame, key: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions as F

    row = F.struct(*(F.col(backticked(name)) for name in rows.columns))
    latest = F.max_by(row, F.struct(POSITION_COLUMN, ORDINAL_COLUMN)).alias("row")
    return rows.groupBy(*(F.col(backticked(name)) for name in key)).agg(latest).select("row.*")


def _new_rows(batches: Iterator[pa.RecordBatch], history: PartHistory) -> pa.Table | None:
    """Return the new rows of a part; None if there are no changes. batches: with the columns _TASK_ROWS."""
    images: list[pa.Table] = []
    stored: list[pa.Table] = []
    for batch in batches:
        images += [from_ipc(stream.as_buffer()) for stream in batch["images"] if stream.is_valid]
        stored += [from_ipc(stream.as_buffer()) for stream in batch["stored"] if stream.is_valid]
    return history.new_rows(images, stored) if images else None


def _piece_of_changes(part: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
    columns = {"part": pa.array([part], pa.int32()), "stored": pa.nulls(1, pa.binary()), "images": [to_ipc(rows)]}
    yield pa.RecordBatch.from_pydict(columns)


def _piece_of_stored(part: int, rows: pa.Table) -> pa.RecordBatch:
    columns = {"part": pa.array([part], pa.int32()), "stored": [to_ipc(rows)], "images": pa.nulls(1, pa.binary())}
    return pa.RecordBatch.from_pydict(columns)
