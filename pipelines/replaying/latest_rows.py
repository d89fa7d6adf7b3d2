"""The latest rows of one large table from the log, computed by Spark executors, in two ways.

`fold_table` folds the changes of any table. `fold_parts` sends the result to the driver, in parts that fit into the
driver's memory.

For a table without partial images there is a second way: executors convert log rows to the typed columns of the target,
and keep the last row of every key. This is several times as fast, because no row image passes through the JVM as a map.

- `latest_rows_frame` returns these rows as a frame.
- `write_latest_files` writes them to Parquet files, if executors can write to the target. It is faster than the frame:
  Spark moves blobs of Arrow from the readers of the log to the writers, and no row enters the JVM. Each writer gets the
  keys of one hash value. If a task fails, its files belong to no table, as with Spark's own writer.

These two functions convert a row before they know whether a later change replaced it. So they may fail at a value that
the target would not contain. The caller then folds the table.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from cdc.log.disk_format import LogFile
from cdc.log.file_selection import split
from cdc.log.reader import read_file
from cdc.position import Position
from cdc.table import TableState
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.folding.fences_and_statistics import Fence
from pipelines.folding.key_parts import from_ipc, split_by_part, to_ipc
from pipelines.folding.keyless_fold import image_texts, net_changes
from pipelines.folding.spark_fold import FOLDED, collect_parts, fold_frame
from pipelines.replaying.table_sizes_in_log import TableContents, filter_sink_rows
from pipelines.sinks.delta.executor_files import FILES
from pipelines.sinks.delta.new_data_files import SAMPLE_ROWS, DataFile, TargetFolder, parquet_options, statistics
from pipelines.sinks.delta.target_columns import RowShape

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPLIT_BYTES: Final = 8 << 20
"""Approximate log bytes that one Spark task reads; with small tasks, the last task ends soon after the others."""
BATCH_ROWS: Final = 65_536
"""Number of log rows that are converted to typed columns at once."""
_COLUMNS: Final = ("position", "ordinal", "relation", "topic", "op", "key", "after", "address")
KEY_TEXT: Final = "_key"
"""Name of the column with the key of a row as one text."""
IS_DELETED: Final = "_gone"
"""Name of the column that says whether a row is a delete."""
_RANK: Final = "_place"
_PARTITION_SCHEMA: Final = "part int, rows binary"


@dataclass(frozen=True, slots=True)
class LatestRowsQuery:
    """The rows of the log that executors read for one table, and the typed columns to which they convert these rows.

    Executors receive a pickled instance.
    """

    table: TableContents
    sink: str
    globs: tuple[str, ...]
    upto: int
    shape: RowShape

    @property
    def columns(self) -> pa.Schema:
        """The columns of the typed rows: the columns of the target, KEY_TEXT and IS_DELETED."""
        columns = self.shape.image_columns
        return columns.append(pa.field(KEY_TEXT, pa.string())).append(pa.field(IS_DELETED, pa.bool_()))


def latest_rows_frame(spark: SparkSession, files: Sequence[LogFile], wanted: LatestRowsQuery) -> DataFrame:
    """Return a frame with the rows of the table at `upto` and the columns of the target.

    The log is read when Spark executes the frame.
    """
    parts = split(files, SPLIT_BYTES)

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch["id"].to_pylist():
                for file in parts[number]:
                    yield from read_typed_rows(file, wanted)

    numbers = spark.range(0, len(parts), 1, len(parts))
    rows = numbers.mapInArrow(read, from_arrow_schema(wanted.columns))
    # a window sorts the wide rows once; an aggregate would also sort them before the shuffle, where few keys are equal
    newest = Window.partitionBy(KEY_TEXT).orderBy(F.desc(POSITION_COLUMN), F.desc(ORDINAL_COLUMN))
    ranked = rows.withColumn(_RANK, F.row_number().over(newest))
    return ranked.where(f"{_RANK} = 1 AND NOT {IS_DELETED}").drop(_RANK, KEY_TEXT, IS_DELETED)


def read_typed_rows(file: LogFile, wanted: LatestRowsQuery) -> Iterator[pa.RecordBatch]:
    """Read the table's rows from one log file and convert them to typed columns.

    Rows that a later truncate or the end of a later full copy removes are left out.
    """
    rows = read_file(file, Position(0), Position(wanted.upto), list(_COLUMNS))
    rows = rows.filter(pc.equal(rows["relation"], wanted.table.relation))
    rows = filter_sink_rows(rows, wanted.sink, wanted.globs)
    rows = rows.filter(pc.is_in(rows["op"], pa.array(["c", "d", "r", "u"])))
    fence = wanted.table.statistics.fences.get(wanted.table.relation, Fence())
    rows = rows.filter(pc.invert(fence.hides(rows)))
    for start in range(0, rows.num_rows, BATCH_ROWS):
        part = rows.slice(start, BATCH_ROWS)
        is_deleted = pc.equal(part["op"], "d")
        # the values of a deleted row are not needed
        images = pc.if_else(is_deleted, pa.nulls(part.num_rows, part["after"].type), part["after"].combine_chunks())
        typed = wanted.shape.rows(part.set_column(part.column_names.index("after"), "after", images))
        key = pc.binary_join(part["key"], "\0")
        yield from pa.table([*typed.columns, key, is_deleted], schema=wanted.columns).to_batches()


if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def write_latest_files(
    spark: SparkSession, files: Sequence[LogFile], wanted: LatestRowsQuery, folder: TargetFolder, parts: int
) -> list[DataFile]:
    """Write the rows of the table at `upto` to files in the folder, at most one file for each of `parts` parts.

    A part has to fit into the memory of a worker. Raises PySparkException for a value that does not fit its column,
    even if a later change replaced the value.
    """
    groups = split(files, SPLIT_BYTES)

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch["id"].to_pylist():
                typed = [rows for file in groups[number] for rows in read_typed_rows(file, wanted)]
                yield from _partition_rows(pa.Table.from_batches(typed, wanted.columns), parts)

    def write(received: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = [from_ipc(blob.as_buffer()) for batch in received for blob in batch["rows"]]
        rows = _keep_newest(pa.concat_tables(found)) if found else None
        if rows is not None and rows.num_rows:
            yield pa.RecordBatch.from_pylist([asdict(_write_file(rows, folder))])

    numbers = spark.range(0, len(groups), 1, len(groups))
    partitioned = numbers.mapInArrow(read, _PARTITION_SCHEMA).repartitionById(parts, "part")
    return [DataFile(**row.asDict()) for row in partitioned.mapInArrow(write, FILES).collect()]


def _partition_rows(rows: pa.Table, parts: int) -> Iterator[pa.RecordBatch]:
    """Divide rows into parts by a hash of the key, so that all rows of a key are in the same part."""
    part_of = np.fromiter(map(crc32, _keys(rows)), np.uint32, rows.num_rows) % parts
    for part, indices in split_by_part(part_of, parts):
        if len(indices):
            blob = to_ipc(rows.take(indices))
            yield pa.RecordBatch.from_pydict({"part": pa.array([part], pa.int32()), "rows": [blob]})


def _keys(rows: pa.Table) -> Iterable[bytes]:
    keys: list[bytes] = rows[KEY_TEXT].cast(pa.binary()).to_pylist()
    return keys


def _keep_newest(rows: pa.Table) -> pa.Table:
    """Return the last row of every key, without deleted rows and without the columns KEY_TEXT and IS_DELETED."""
    keys = rows[KEY_TEXT].combine_chunks().dictionary_encode()
    if len(keys.dictionary) < rows.num_rows:
        order = np.lexsort((rows[ORDINAL_COLUMN].to_numpy(), rows[POSITION_COLUMN].to_numpy()))
        last = np.empty(len(keys.dictionary), np.int64)
        last[keys.indices.to_numpy()[order]] = order  # the last assignment to an index stays
        rows = rows.take(pa.array(np.sort(last)))
    return rows.filter(pc.invert(rows[IS_DELETED])).drop_columns([KEY_TEXT, IS_DELETED])


def _write_file(rows: pa.Table, folder: TargetFolder) -> DataFile:
    name = f"part-{uuid.uuid4()}.parquet"
    files, options = folder.file_system, parquet_options(rows.schema, rows.slice(0, SAMPLE_ROWS))
    pq.write_table(rows, name, filesystem=files, store_schema=False, **options)
    size = files.get_file_info(name).size
    return DataFile(name, size, rows.num_rows, statistics(rows, folder.statistics_columns))


_IMAGE: Final = "image"


def fold_table(rows: DataFrame, table: TableContents, sink: str) -> DataFrame:
    """Fold all log rows of a table to its current rows with the schema FOLDED.

    In a table without a key, equal images are in the same Spark partition. There the inserts and deletes of equal rows
    cancel out.
    """
    of_table = rows.where(F.col("relation") == table.relation)
    return _fold_keyed(of_table, table, sink) if table.schema.key else _fold_keyless(of_table, table, sink)


def fold_parts(rows: DataFrame, table: TableContents, sink: str) -> Iterator[pa.Table]:
    """Do the same as `fold_table`, but send the result to the driver, in parts that fit into its memory."""
    return collect_parts(fold_table(rows, table, sink))


def _fold_keyed(rows: DataFrame, table: TableContents, sink: str) -> DataFrame:
    current = fold_frame(rows, sink=sink, statistics=table.statistics).where("op = 'u'")
    if table.statistics.partial and table.schema.state is TableState.SNAPSHOTTING:
        # an incomplete row waits for the running copy, because a base row in the target may belong to another row
        current = current.where("complete")
    # the literal saves the Spark job that looks for incomplete rows
    return current if table.statistics.partial else current.withColumn("complete", F.lit(True))


def _fold_keyless(rows: DataFrame, table: TableContents, sink: str) -> DataFrame:
    changed = fold_frame(rows, sink=sink, statistics=replace(table.statistics, keyless=True))
    changed = changed.where(F.col("op").isin("u", "d"))
    schema = table.schema

    def add_image_text(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            yield from rows.append_column(_IMAGE, image_texts(rows, schema)).to_batches()

    def cancel_out(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if received := list(batches):
            yield from net_changes(pa.Table.from_batches(received), schema).drop_columns([_IMAGE]).to_batches()

    by_image = changed.mapInArrow(add_image_text, StructType([*FOLDED, StructField(_IMAGE, StringType())]))
    return by_image.repartition(_IMAGE).mapInArrow(cancel_out, FOLDED)
