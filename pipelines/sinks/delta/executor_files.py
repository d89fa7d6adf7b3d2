"""Data files that Spark's executors write for a target, and the commit of the driver that adds them.

Executors write with pyarrow. So they need no Delta jar, and no Hadoop file system for an object store.
"""

from __future__ import annotations

import json
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
from pipelines.sinks.delta.target_layout import rows_by_partition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FILES: Final = "name string, size long, rows long, statistics string, partition string"
"""The columns of a frame of `DataFile`s."""


GROUP_ROWS: Final = 65_536
"""Approximate rows of a row group of a file without partition columns."""
WAITING_BYTES: Final = 256 << 20
"""Approximate bytes of rows that a task has in memory, before it writes a file for each of their partitions."""


class PartFiles:
    """The data files of one task, which gets rows piece by piece: one file, or files for each partition of the rows."""

    def __init__(self, folder: TargetFolder) -> None:
        self._folder = folder
        self._waiting: list[pa.Table] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._open: _OpenFile | None = None
        self._written: list[DataFile] = []

    def add(self, rows: pa.Table) -> None:
        """Take rows with all columns of the target. Raises ExecutorFilesUnusable if they cannot be written."""
        self._waiting.append(rows)
        self._waiting_rows += rows.num_rows
        self._waiting_bytes += rows.nbytes
        is_due = self._waiting_bytes >= WAITING_BYTES
        if is_due or (self._waiting_rows >= GROUP_ROWS and not self._folder.partition_columns):
            self._write_waiting()

    def close(self) -> Iterator[pa.RecordBatch]:
        """Yield a DataFile for each file."""
        self._write_waiting()
        if self._open is not None:
            self._written.append(self._open.close())
        if self._written:
            yield pa.RecordBatch.from_pylist([asdict(file) for file in self._written])

    def _write_waiting(self) -> None:
        waiting, rows = self._waiting, self._waiting_rows
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        if not rows:
            return
        table = pa.concat_tables(waiting)
        for values, numbers in rows_by_partition(table, self._folder.partition_columns):
            if numbers is None:
                if self._open is None:
                    self._open = _OpenFile(self._folder, table, values)
                self._open.add(table)
            else:
                own = table.take(pa.array(numbers)).drop_columns(list(values))
                file = _OpenFile(self._folder, own, values)
                file.add(own)
                self._written.append(file.close())


class _OpenFile:
    """A data file that is being written."""

    def __init__(self, folder: TargetFolder, sample: pa.Table, values: dict[str, str | None]) -> None:
        """sample: some of the rows. values: partition column → value as text."""
        self._name, self._values = f"part-{uuid.uuid4()}.parquet", values
        self._file_system = folder.file_system
        self._statistics = FileStatistics(folder.statistics_columns)
        options = parquet_options(sample.schema, sample.slice(0, SAMPLE_ROWS))
        try:
            self._writer = pq.ParquetWriter(
                self._name, sample.schema, filesystem=self._file_system, store_schema=False, **options
            )
        except OSError as exc:
            if "://" in folder.path:
                raise
            raise unwritable(folder.path, exc) from exc

    def add(self, rows: pa.Table) -> None:
        self._writer.write_table(rows)
        self._statistics.add(rows)

    def close(self) -> DataFile:
        self._writer.close()
        size = self._file_system.get_file_info(self._name).size
        partition = json.dumps(self._values, ensure_ascii=False)
        return DataFile(self._name, size, self._statistics.rows, self._statistics.to_json(), partition)


def takes_files(target: DeltaTarget) -> bool:
    """Return whether a commit of the driver can add files of executors to a target."""
    return not isinstance(target, SparkTarget)


def folder_of(target: DeltaTarget) -> TargetFolder:
    """Return the directory of a target, into which executors write."""
    return TargetFolder(target.uri, target.statistics_columns, tuple(target.metadata.partition_columns))


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
    if "://" in folder.path:
        return
    for file in files:
        check_readable(Path(folder.path) / file.name, file.size)
