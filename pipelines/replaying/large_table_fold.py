"""Fold of one large table by Spark: the rows that the table has at a position, in parts that fit into the driver."""

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
    """Fold all log rows of a table to its current rows with the schema FOLDED.

    Only a table with partial images can have incomplete rows. For a table without a key, equal images are in the same
    part, so inserts and deletes of a row cancel out there.
    """
    of_table = rows.where(F.col("relation") == table.relation)
    return _fold_keyed(of_table, table, sink) if table.schema.key else _fold_keyless(of_table, table, sink)


def collect_parts(folded: DataFrame) -> Iterator[pa.Table]:
    """Yield the partitions of a frame on the driver, one after the other."""

    def packed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        received = list(batches)
        if not received:
            return
        rows = pa.Table.from_batches(received)
        written = pa.BufferOutputStream()
        with pa.ipc.new_stream(written, rows.schema) as stream:
            stream.write_table(rows)
        yield pa.RecordBatch.from_pydict({"part": [written.getvalue().to_pybytes()]})

    for row in folded.mapInArrow(packed, _PACKED).toLocalIterator():
        yield pa.ipc.open_stream(bytes(row["part"])).read_all().cast(FOLDED_ARROW)


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
