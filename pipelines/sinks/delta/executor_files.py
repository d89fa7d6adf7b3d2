"""Data files that Spark's executors write for a target on a disk, and the commit of the driver that adds them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from cdc.failpoint import hit
from pipelines.runtime.executor_code import raising_task_errors
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.new_data_files import SAMPLE_ROWS, DataFile, FileStatistics, TargetFolder, parquet_options
from pipelines.sinks.delta.shared_directory import check_readable, unwritable
from pipelines.sinks.delta.spark_target import SparkTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FILES: Final = "name string, size long, rows long, statistics string"
"""The columns of a frame of `DataFile`s."""


class PartFile:
    """The data file of one part, which a task writes piece by piece."""

    def __init__(self, folder: TargetFolder) -> None:
        self._path = Path(folder.path) / f"part-{uuid.uuid4()}.parquet"
        self._statistics = FileStatistics(folder.statistics_columns)
        self._writer: pq.ParquetWriter | None = None

    def add(self, rows: pa.Table) -> None:
        """Write some rows to the file; the first ones create it. Raises ExecutorFilesUnusable if they cannot."""
        if not rows.num_rows:
            return
        if self._writer is None:
            options = parquet_options(rows.schema, rows.slice(0, SAMPLE_ROWS))
            try:
                self._writer = pq.ParquetWriter(self._path, rows.schema, store_schema=False, **options)
            except OSError as exc:
                raise unwritable(str(self._path.parent), exc) from exc
        self._writer.write_table(rows)
        self._statistics.add(rows)

    def close(self) -> Iterator[pa.RecordBatch]:
        """Yield the DataFile of the rows, if there are any."""
        if self._writer is None:
            return
        self._writer.close()
        rows, size = self._statistics.rows, self._path.stat().st_size
        yield pa.RecordBatch.from_pylist([asdict(DataFile(self._path.name, size, rows, self._statistics.to_json()))])


def takes_files(target: DeltaTarget) -> bool:
    """Return whether a commit can add files of executors to a target: it is on a disk, and has no partitions."""
    if "://" in target.uri or isinstance(target, SparkTarget):
        return False
    return not target.metadata.partition_columns


def collect_files(written: Sequence[DataFrame]) -> list[DataFile]:
    """Let executors write data files, and return their names, sizes and statistics.

    written: frames with the columns FILES, whose tasks write the files.
    """
    with raising_task_errors():
        return [DataFile(**row.asDict()) for frame in written for row in frame.collect()]


def add_files(target: DeltaTarget, files: Sequence[DataFile], marker: TxnMarker) -> None:
    """Add data files that executors wrote to the target, in one commit."""
    check_visible(TargetFolder(target.uri, ()), files)
    hit("delta_executor_files")
    target.check_not_committed(marker)
    target.add([file.add_action() for file in files], marker.properties)


def check_visible(folder: TargetFolder, files: Sequence[DataFile]) -> None:
    """Raise ExecutorFilesUnusable, so that nothing is committed, if the driver cannot read a file of an executor."""
    for file in files:
        check_readable(Path(folder.path) / file.name, file.size)
