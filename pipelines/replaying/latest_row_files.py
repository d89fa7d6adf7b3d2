"""Latest files: the newest row of every key of one table, written to Parquet by executors, no row ever in the JVM.

As `latest`, for a target whose folder executors can write to, and several times as fast: rows are dealt into parts by
a hash of their key, and what Spark moves from the readers of the log to the writers of the parts is some blobs of
Arrow instead of rows. Files that a failed task leaves behind belong to no table, as those of Spark's own writer do.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc.log.layout import LogFile
from cdc.log.ranges import split
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.compaction.row_partitions import opened, packed, places_by_part
from pipelines.replaying.latest_rows import IS_DELETED, KEY_TEXT, SPLIT_BYTES, LatestRowsQuery, read_typed_rows
from pipelines.sinks.delta.file_statistics import DataFile, TargetFolder, statistics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PARTITION_SCHEMA: Final = "part int, rows binary"
_FILE_SCHEMA: Final = "name string, size long, rows long, statistics string"


def write_latest_files(
    spark: SparkSession, files: Sequence[LogFile], wanted: LatestRowsQuery, folder: TargetFolder, parts: int
) -> list[DataFile]:
    """The table at `upto` as files in the folder, at most one for each part; a part has to fit into a worker's memory.

    Raises PySparkException around a value that does not fit, also for one that a later change replaced.
    """
    groups = split(files, SPLIT_BYTES)

    def deal(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch["id"].to_pylist():
                typed = [rows for file in groups[number] for rows in read_typed_rows(file, wanted)]
                yield from _partition_rows(pa.Table.from_batches(typed, wanted.columns), parts)

    def write(dealt: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = [opened(blob.as_buffer()) for batch in dealt for blob in batch["rows"]]
        rows = _keep_newest(pa.concat_tables(found)) if found else None
        if rows is not None and rows.num_rows:
            yield pa.RecordBatch.from_pylist([asdict(_write_file(rows, folder))])

    numbers = spark.range(0, len(groups), 1, len(groups))
    dealt = numbers.mapInArrow(deal, _PARTITION_SCHEMA).repartitionById(parts, "part")
    return [DataFile(**row.asDict()) for row in dealt.mapInArrow(write, _FILE_SCHEMA).collect()]


def _partition_rows(rows: pa.Table, parts: int) -> Iterator[pa.RecordBatch]:
    """The rows by part: all rows of a key are in the same one, whoever deals."""
    part_of = np.fromiter(map(crc32, _keys(rows)), np.uint32, rows.num_rows) % parts
    for part, places in places_by_part(part_of, parts):
        if len(places):
            blob = packed(rows.take(places))
            yield pa.RecordBatch.from_pydict({"part": pa.array([part], pa.int32()), "rows": [blob]})


def _keys(rows: pa.Table) -> Iterable[bytes]:
    keys: list[bytes] = rows[KEY_TEXT].cast(pa.binary()).to_pylist()
    return keys


def _keep_newest(rows: pa.Table) -> pa.Table:
    """The last row of every key, without those that are deleted and what was only needed to find them."""
    keys = rows[KEY_TEXT].combine_chunks().dictionary_encode()
    if len(keys.dictionary) < rows.num_rows:
        places = np.lexsort((rows[ORDINAL_COLUMN].to_numpy(), rows[POSITION_COLUMN].to_numpy()))
        last = np.empty(len(keys.dictionary), np.int64)
        last[keys.indices.to_numpy()[places]] = places  # of places assigned twice the last one stays
        rows = rows.take(pa.array(np.sort(last)))
    return rows.filter(pc.invert(rows[IS_DELETED])).drop_columns([KEY_TEXT, IS_DELETED])


def _write_file(rows: pa.Table, folder: TargetFolder) -> DataFile:
    name = f"part-{uuid.uuid4()}.parquet"
    path = Path(folder.path) / name
    # bounds of floating columns leave NaN out, and Spark, for which it is the greatest value, would skip rows
    bounded = [field.name for field in rows.schema if not pa.types.is_floating(field.type)]
    pq.write_table(rows, path, compression="snappy", store_schema=False, write_statistics=bounded)
    return DataFile(name, path.stat().st_size, rows.num_rows, statistics(rows, folder.statistics_columns))
