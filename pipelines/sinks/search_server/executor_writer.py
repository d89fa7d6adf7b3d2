"""Executor writer: Spark tasks send the documents of a large batch to the search server themselves.

A key is in one partition, and each document has its position as external version. So tasks need no order, and Spark may
run a task again or twice: the second attempt writes the same versions, which changes nothing. Tasks make documents with
the row writer of a small batch, which completes partial images from the current documents, counts refused documents,
and sends fewer requests while the server rejects some as too many.

Only a row that moved to another key, and whose image is partial, depends on the document of another key. The base
documents of all such rows are stored before any task writes. The driver does this, and then writes these rows, with
those that it has of the batch anyway. A batch with more than MAX_MOVED of them is refused before anything is written.

Apart from these rows, the driver gets nothing of the batch, except for one row of each task that could not write all
of its documents; `refused` also gets the rows that the server refuses, not many more than the caller wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

import pyarrow as pa

from cdc.config.search_server import SearchServer
from cdc.errors import CdcError, TooManyMovedRows, error_of_code
from cdc.targets.search_server.client import SearchClient
from pipelines.folding.executor_fold import COLLECTED_BYTES, MAX_MOVES
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.folded_parts import IMAGES, FoldedParts, collect_images, first_images, piece_of_images
from pipelines.runtime.executor_code import forwarding_errors, raising_task_errors
from pipelines.sinks.search_server.bulk_writer import Line
from pipelines.sinks.search_server.document_lines import TableIndex
from pipelines.sinks.search_server.row_writer import (
    PlannedRows,
    RowWriter,
    only_moved,
    open_row_writer,
    without_moved,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MAX_MOVED: Final = MAX_MOVES
"""Maximum number of rows of a batch that moved to another key with a partial image; the driver has their documents.

It is that of a whole range which is divided by key. So a table exceeds it only in a range that Spark folds as a plan.
"""
ExecutorRows: TypeAlias = "FoldedParts | DataFrame"
"""Folded rows on the executors: the parts of a large range, or the frame of a replay."""
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
    max_moved: int = MAX_MOVED

    def write(self, of_executors: ExecutorRows, of_driver: DriverRows) -> None:
        """Write all rows of the executors, then those of the driver.

        Raises the error with the lowest position if documents were refused or base rows are missing; other documents
        may then be written. Raises SinkUnavailable and errors of the whole index as RowWriter.write does.
        """
        with raising_task_errors():
            found = _map(of_executors, self._with_share(of_executors).write_partition, _FIRST_ERROR).collect()
        errors = [(row["position"], error_of_code(row["code"], row["message"])) for row in found]
        if found:
            raise min(errors, key=lambda error: error[0])[1]
        refused = of_driver.write(self.table)
        if refused:
            raise refused[min(refused)]

    def refused(self, of_executors: ExecutorRows, of_driver: DriverRows, limit: int) -> pa.Table:
        """Return the rows that the server refuses, not many more than `limit`; the other rows are then written."""
        task = self._with_share(of_executors)

        def write(parts: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
            yield from task.refused_in_partition(parts, limit)

        with raising_task_errors():
            rows = first_images(_map(of_executors, write, IMAGES), limit)
        numbers = sorted(of_driver.write(self.table))
        return pa.concat_tables([rows, of_driver.rows.take(pa.array(numbers, pa.int64()))])

    def driver_rows(self, of_executors: ExecutorRows, own: pa.Table | None, rows: RowWriter) -> DriverRows:
        """Store the base documents of the moved rows of the batch, and return what the driver writes of it.

        own: rows of the batch that are on the driver. Raises TooManyMovedRows.
        """
        moved = self._moved(of_executors)
        together = moved if own is None else pa.concat_tables([own, moved])
        planned = self._plan(together, rows)
        rows.store_bases(planned)
        # the documents are made now, because tasks may replace those of which they are made
        planned.lines = list(planned.lines)
        return DriverRows(together, planned, rows)

    def write_partition(self, parts: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
        """In a task: write the rows of a partition; return one row with the first error if some were not written."""
        with forwarding_errors(), SearchClient(self.access, self.engine) as client:
            rows = open_row_writer(client, self.access, self.sink)
            lines = _PartitionLines(lambda part: self._plan(part, rows))
            first = lines.first_error(rows.write(PlannedRows(lines.of(parts)), self.table))
        if first is not None:
            position, error = first
            row = {"position": position, "code": error.code, "message": error.message}
            yield pa.RecordBatch.from_pylist([row])

    def refused_in_partition(self, parts: Iterator[pa.Table], limit: int) -> Iterator[pa.RecordBatch]:
        """In a task: write the rows of a partition; return about `limit` rows that the server refuses, at most."""
        count = 0
        with forwarding_errors(), SearchClient(self.access, self.engine) as client:
            rows = open_row_writer(client, self.access, self.sink)
            for part in parts:
                unmoved = without_moved(part)
                numbers = sorted(rows.write(self._plan(unmoved, rows), self.table))
                chosen = unmoved.take(pa.array(numbers[: max(0, limit + 1 - count)], pa.int64()))
                count += chosen.num_rows
                if chosen.num_rows:
                    yield piece_of_images(0, chosen)

    def with_share_of_requests(self, tasks: int) -> ExecutorWriter:
        """Return the writer for tasks of which so many run at once: together they send `bulk_requests` requests."""
        share = max(1, self.access.bulk_requests // tasks)
        return replace(self, access=self.access.model_copy(update={"bulk_requests": share}))

    def _with_share(self, of_executors: ExecutorRows) -> ExecutorWriter:
        session = of_executors.session if isinstance(of_executors, FoldedParts) else of_executors.sparkSession
        return self.with_share_of_requests(session.sparkContext.defaultParallelism)

    def _plan(self, part: pa.Table, rows: RowWriter) -> PlannedRows:
        return rows.plan(part, self.table, self.since, is_copying=self.is_copying)

    def _moved(self, of_executors: ExecutorRows) -> pa.Table:
        """Return the partial images of rows that moved to another key."""
        if isinstance(of_executors, FoldedParts) and not of_executors.table.incomplete:
            return FOLDED_ARROW.empty_table()
        with raising_task_errors():
            count = _map(of_executors, _count_moved, "rows long, size long")
            total = count.selectExpr("coalesce(sum(rows), 0) AS rows", "coalesce(sum(size), 0) AS size").first()
            rows, size = (0, 0) if total is None else (total["rows"], total["size"])
            if rows > self.max_moved:
                raise TooManyMovedRows(
                    f"{rows:,} rows of table {self.table.shape.schema.topic!r} moved to another key in one range, "
                    f"without all of their columns; the apply process completes at most {self.max_moved:,}"
                )
            if not rows:
                return FOLDED_ARROW.empty_table()
            return collect_images(_map(of_executors, _pieces_of_moved, IMAGES), at_once=size <= COLLECTED_BYTES)


@dataclass(frozen=True, slots=True)
class DriverRows:
    """The rows of a batch that the driver writes, after their base documents were stored."""

    rows: pa.Table
    planned: PlannedRows
    writer: RowWriter

    def write(self, table: TableIndex) -> dict[int, CdcError]:
        """Write the rows; return row number → error of each row that cannot be written."""
        return self.writer.write(self.planned, table)


class _PartitionLines:
    """The lines of one partition, which are built while earlier ones are written."""

    def __init__(self, plan: Callable[[pa.Table], PlannedRows]) -> None:
        self._plan = plan
        self._positions: list[pa.ChunkedArray] = []
        self._missing: list[tuple[int, CdcError]] = []
        """Position and error of each partial image without a base row."""

    def of(self, parts: Iterator[pa.Table]) -> Iterator[Line]:
        """Yield the lines of the rows that did not move, with the numbers of the rows in the partition."""
        start = 0
        for part in parts:
            unmoved = without_moved(part)
            planned = self._plan(unmoved)
            # a copy, because a slice would keep the whole batch in memory
            positions = pa.chunked_array([unmoved["position"].to_numpy().copy()])
            self._positions.append(positions)
            self._missing += [(positions[number].as_py(), error) for number, error in planned.missing.items()]
            for number, content in planned.lines:
                yield Line(start + number, content)
            start += unmoved.num_rows

    def first_error(self, refused: dict[int, CdcError]) -> tuple[int, CdcError] | None:
        """Return the lowest position of a row that was not written, with its error; None if there is none.

        refused: number → error of each document that the server refused.
        """
        positions = pa.chunked_array([chunk for part in self._positions for chunk in part.chunks], pa.int64())
        failed = [(positions[number].as_py(), error) for number, error in refused.items()]
        return min([*failed, *self._missing], key=lambda failure: failure[0], default=None)


def _map(
    of_executors: ExecutorRows, task: Callable[[Iterator[pa.Table]], Iterator[pa.RecordBatch]], columns: str
) -> DataFrame:
    """Return the frame of the batches that a task makes of the folded rows of a partition."""
    if isinstance(of_executors, FoldedParts):
        return of_executors.map_parts(lambda pieces: task(rows for _, rows in pieces), columns)
    return of_executors.mapInArrow(lambda batches: task(map(_folded, batches)), columns)


def _folded(batch: pa.RecordBatch) -> pa.Table:
    """Return a batch of a frame as folded rows."""
    columns = [batch[f.name].cast(f.type) if f.name in batch.schema.names else None for f in FOLDED_ARROW]
    empty = [pa.nulls(batch.num_rows, field.type) for field in FOLDED_ARROW]
    return pa.table([e if c is None else c for c, e in zip(columns, empty, strict=True)], schema=FOLDED_ARROW)


def _count_moved(parts: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        moved = only_moved(part)
        yield pa.RecordBatch.from_pydict({"rows": [moved.num_rows], "size": [moved.nbytes]})


def _pieces_of_moved(parts: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        if (moved := only_moved(part)).num_rows:
            yield piece_of_images(0, moved)
