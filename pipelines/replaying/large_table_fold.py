"""Folded: the rows of one large table at a position, as Spark folds them from the log, in parts that fit the driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from cdc.table import TableState
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.keyless_fold import image_texts, net_changes
from pipelines.folding.spark_fold import FOLDED, fold_frame
from pipelines.replaying.log_contents import TableContents

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PACKED: Final = "part binary"
_IMAGE: Final = "image"


def fold_table(rows: DataFrame, table: TableContents, sink: str) -> DataFrame:
    """Log rows of a table from the beginning on → its rows as FOLDED; only those of a partial table can be incomplete.

    Of a table without a key equal rows that came and went are in one part: none is looked for in another.
    """
    of_table = rows.where(F.col("relation") == table.relation)
    return _fold_keyed(of_table, table, sink) if table.schema.key else _fold_keyless(of_table, table, sink)


def collect_parts(folded: DataFrame) -> Iterator[pa.Table]:
    """A frame of folded rows, one partition after the other, never two of them on the driver."""

    def packed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = list(batches)
        if not held:
            return
        rows = pa.Table.from_batches(held)
        written = pa.BufferOutputStream()
        with pa.ipc.new_stream(written, rows.schema) as stream:
            stream.write_table(rows)
        yield pa.RecordBatch.from_pydict({"part": [written.getvalue().to_pybytes()]})

    for row in folded.mapInArrow(packed, _PACKED).toLocalIterator():
        yield pa.ipc.open_stream(bytes(row["part"])).read_all().cast(FOLDED_ARROW)


def _fold_keyed(rows: DataFrame, table: TableContents, sink: str) -> DataFrame:
    alive = fold_frame(rows, sink=sink, statistics=table.statistics).where("op = 'u'")
    if table.statistics.partial and table.schema.state is TableState.SNAPSHOTTING:
        # what the log does not complete waits for its copy: a part put before may hold another row of its old key
        alive = alive.where("complete")
    # said as a literal, Spark knows without a job that there are no incomplete rows
    return alive if table.statistics.partial else alive.withColumn("complete", F.lit(True))


def _fold_keyless(rows: DataFrame, table: TableContents, sink: str) -> DataFrame:
    changed = fold_frame(rows, sink=sink, statistics=replace(table.statistics, keyless=True))
    changed = changed.where(F.col("op").isin("u", "d"))
    schema = table.schema

    def known(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            yield from rows.append_column(_IMAGE, image_texts(rows, schema)).to_batches()

    def left(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if held := list(batches):
            yield from net_changes(pa.Table.from_batches(held), schema).drop_columns([_IMAGE]).to_batches()

    by_image = changed.mapInArrow(known, StructType([*FOLDED, StructField(_IMAGE, StringType())]))
    return by_image.repartition(_IMAGE).mapInArrow(left, FOLDED)
