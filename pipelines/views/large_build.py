"""The large computation of a view: executors compute its rows and their changes, which the driver reads file by file.

It is for a first build, a whole computation whose differences from the log are logged, rows that became old, and a step
with many affected keys. `ComputationLimits` says from which sizes. Executors also read and fold the rows that the log
of views has. They divide all rows into parts by key; one task compares the rows of a part (`build_files.py`).

The changes are in files below the log of views, in `_builds`. They have no positions yet, because only the writer of
the log knows which the next one is. The driver has names of files, then the rows of one file after the other, about
32 MiB, which it writes to the files of the log. A task has the rows of a part: those that PART_ROWS rows of the inputs
give, and those that the log has of the same keys. A view with far more rows than its inputs needs larger workers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from cdc.bucket_files import Root, remove_folder
from cdc.failpoint import hit
from cdc.log.computed_views import InputVersion
from cdc.log.file_selection import TableSelection
from cdc.log.table_io import open_data_file
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.folding.executor_fold import ExecutorFold, LogRange
from pipelines.runtime.executor_code import raising_task_errors
from pipelines.sinks.delta.table_version import RowsNotReadable
from pipelines.views.build_files import FILE, PIECE, divide_logged, divide_result, write_changes
from pipelines.views.changed_rows import CHANGED_ROWS
from pipelines.views.followed_inputs import opened
from pipelines.views.log_of_views import BUILDS, LogAsOf

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PART_ROWS: Final = 200_000
"""Rows of the inputs and of the log for one part; a worker compares the rows of a part within some hundred MiB."""
UNKNOWN_PARTS: Final = 64
"""Number of parts if the rows of the inputs cannot be counted."""


def count_rows(inputs: Iterable[InputVersion]) -> int | None:
    """Return the number of rows that the inputs of a view have together; None if it is unknown."""
    try:
        return sum(opened(version).row_count() for version in inputs)
    except RowsNotReadable:
        return None


def number_of_parts(session: SparkSession, rows: int | None, logged: int) -> int:
    """Return the number of parts of a computation. rows: of the inputs, None if unknown. logged: rows in the log."""
    if rows is None:
        return UNKNOWN_PARTS
    return max(session.sparkContext.defaultParallelism, -(-max(rows, logged) // PART_ROWS))


@dataclass(frozen=True, slots=True)
class LargeBuild:
    """Changes of a view, in files that only this process knows."""

    folder: Root
    names: tuple[str, ...]

    def take(self) -> Iterator[pa.Table]:
        """Yield all changes as CHANGED_ROWS; afterwards the files are removed."""
        for name in self.names:
            yield pq.read_table(open_data_file(self.folder / name)).cast(CHANGED_ROWS)
        self.remove()

    def remove(self) -> None:
        """Remove the files."""
        remove_folder(self.folder)


@dataclass(frozen=True, slots=True)
class LargeBuilder:
    """Computes changes of one view by executors; every method raises ViewKeyNotUnique and the errors of `view_rows`."""

    session: SparkSession
    schema: TableSchema
    floor: int | None
    """Time before which rows are left out."""
    log: LogAsOf
    """The log of views with the rows of the view."""
    parts: int
    """Number of parts into which keys are divided; both sides of a comparison need the same number."""

    def all_new(self, result: DataFrame) -> LargeBuild:
        """Return the rows of a result as rows that were read."""
        return self._build(self._divided(result, is_new=True), is_first=True)

    def differences(self, old: DataFrame, new: DataFrame) -> LargeBuild:
        """Return the changes that make the rows of one result of those of another."""
        both = self._divided(old, is_new=False).unionByName(self._divided(new, is_new=True))
        return self._build(both, is_first=False)

    def differences_from_log(self, result: DataFrame) -> LargeBuild:
        """Return the changes that make the rows of a result of those in the log."""
        return self._from_log(self._divided(result, is_new=True), before=None)

    def removed_from_log(self, floor: int) -> LargeBuild:
        """Return the deletes of all rows in the log whose time is before the floor."""
        return self._from_log(self.session.createDataFrame([], PIECE), before=floor)

    def _divided(self, result: DataFrame, *, is_new: bool) -> DataFrame:
        divide = partial(divide_result, schema=self.schema, floor=self.floor, parts=self.parts, is_new=is_new)
        return result.to(result.schema.toNullable()).mapInArrow(divide, PIECE)

    def _from_log(self, new: DataFrame, before: int | None) -> LargeBuild:
        relation = self.schema.relation
        folding = ExecutorFold(
            self.session,
            LogRange(
                files=self.log.files(self.schema),
                after=Position(0),
                upto=self.log.position,
                tables=TableSelection(relations=(relation, relation)),
                sink="",
            ),
        )
        divide = partial(divide_logged, schema=self.schema, parts=self.parts, before=before)
        try:
            with raising_task_errors():
                tables = [table for table in folding.fold() if table.relation == relation]
            old = [folding.parts_of(table).map_parts(divide, PIECE) for table in tables]
            return self._build(old[0].unionByName(new) if old else new, is_first=False)
        finally:
            folding.release()

    def _build(self, pieces: DataFrame, *, is_first: bool) -> LargeBuild:
        folder = self.log.root / BUILDS / uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        write = partial(write_changes, schema=self.schema, folder=folder, is_first=is_first)
        by_part = pieces.repartitionById(self.parts, "part")
        try:
            with raising_task_errors():
                names = by_part.mapInArrow(write, FILE).toArrow()["name"].to_pylist()
        except BaseException:
            remove_folder(folder)
            raise
        hit("view_files_written")
        return LargeBuild(folder, tuple(names))
