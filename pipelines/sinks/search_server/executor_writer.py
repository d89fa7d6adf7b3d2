"""Executor writer: Spark tasks send the documents of a large batch to the search server themselves.

A key is in one partition, and each document has its position as external version. So tasks need no order, and Spark may
run a task again or twice: the second attempt writes the same versions, which changes nothing.

Only a row that moved to another key, and whose image is partial, depends on the document of another key. The driver
stores the base documents of all such rows before any task writes, and then writes these rows itself.

Apart from these rows, the driver gets nothing of the batch, except for one row of each task that could not write all
of its documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from cdc.config.search_server import SearchServer
from cdc.errors import CdcError, error_of_code
from cdc.stores.search_server.client import SearchClient
from pipelines.folding.spark_fold import collect_parts
from pipelines.runtime.executor_code import forwarding_errors, raising_task_errors
from pipelines.sinks.record_after_batch import missing_base
from pipelines.sinks.search_server.bulk_writer import Line
from pipelines.sinks.search_server.document_lines import TableIndex
from pipelines.sinks.search_server.row_writer import PlannedRows, RowWriter, open_row_writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MOVED: Final = "op = 'u' AND NOT complete AND base IS NOT NULL"
_FIRST_ERROR: Final = "position long, code string, message string"


@dataclass(frozen=True, slots=True)
class ExecutorWriter:
    """Writes the documents of one batch of a table from executors, which receive a pickled instance."""

    access: SearchServer
    """Access to the server, with the credentials. Executors need them; Spark does not print them."""
    engine: str
    sink: str
    table: TableIndex
    since: int
    """Published position of the table, before this batch."""
    is_copying: bool
    """Whether a full copy is running; partial images without a base row are then left out."""

    def write(self, frame: DataFrame, rows: RowWriter) -> set[str]:
        """Write all rows of a frame; return the ids of the stored bases. rows: the row writer of the driver.

        Raises the error with the lowest position if documents were refused or base rows are missing; other documents
        may then be written. Raises SinkUnavailable and errors of the whole index as RowWriter.write does.
        """
        with raising_task_errors():
            moved = [self._plan_moved(part, rows) for part in collect_parts(frame.where(_MOVED))]
            unmoved = frame.where(f"NOT coalesce({_MOVED}, false)")
            task = self.with_share_of_requests(unmoved.sparkSession.sparkContext.defaultParallelism)
            found = unmoved.mapInArrow(task, _FIRST_ERROR).collect()
        if found:
            first = min(found, key=lambda row: row["position"])
            raise error_of_code(first["code"], first["message"])
        for planned in moved:
            refused = rows.write(planned, self.table)
            if refused:
                raise refused[min(refused)]
        return {planned.bases_id for planned in moved if planned.bases_id}

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """In a task: write the rows of a partition; return one row with the first error if some were not written."""
        with forwarding_errors(), SearchClient(self.access, self.engine) as client:
            rows = open_row_writer(client, self.access, self.sink)
            lines = _PartitionLines(self, rows)
            refused = rows.write(PlannedRows(lines.of(batches)), self.table)
            first = lines.first_error(refused)
        if first is not None:
            position, error = first
            row = {"position": position, "code": error.code, "message": error.message}
            yield pa.RecordBatch.from_pylist([row])

    def with_share_of_requests(self, tasks: int) -> ExecutorWriter:
        """Return the writer for tasks of which so many run at once: together they send `bulk_requests` requests."""
        share = max(1, self.access.bulk_requests // tasks)
        return replace(self, access=self.access.model_copy(update={"bulk_requests": share}))

    def _plan_moved(self, part: pa.Table, rows: RowWriter) -> PlannedRows:
        """Store the base documents of moved rows, and return the lines of these rows."""
        planned = rows.plan(part, self.table, self.since)
        if planned.missing and not self.is_copying:
            raise missing_base(self.table.shape.schema, part["position"][planned.missing[0]].as_py())
        rows.store_bases(planned)
        return PlannedRows(list(planned.lines), bases_id=planned.bases_id)


class _PartitionLines:
    """The lines of one partition, which are built while earlier ones are written."""

    def __init__(self, task: ExecutorWriter, rows: RowWriter) -> None:
        self._task, self._rows = task, rows
        self._positions: list[pa.ChunkedArray] = []
        self._missing: list[int] = []
        """Positions of partial images without a base row."""

    def of(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Line]:
        """Yield the lines of the rows, with the numbers of the rows in the partition."""
        start = 0
        for batch in batches:
            part = pa.Table.from_batches([batch])
            planned = self._rows.plan(part, self._task.table, self._task.since)
            # a copy, because a slice would keep the whole batch in memory
            positions = pa.chunked_array([part["position"].to_numpy().copy()])
            self._positions.append(positions)
            self._missing += [positions[number].as_py() for number in planned.missing]
            for number, content in planned.lines:
                yield Line(start + number, content)
            start += part.num_rows

    def first_error(self, refused: dict[int, CdcError]) -> tuple[int, CdcError] | None:
        """Return the lowest position of a row that was not written, with its error; None if there is none.

        refused: number → error of each document that the server refused.
        """
        positions = pa.chunked_array([chunk for part in self._positions for chunk in part.chunks], pa.int64())
        failed = [(positions[number].as_py(), error) for number, error in refused.items()]
        if not self._task.is_copying:
            schema = self._task.table.shape.schema
            failed += [(position, missing_base(schema, position)) for position in self._missing]
        return min(failed, key=lambda one: one[0], default=None)
