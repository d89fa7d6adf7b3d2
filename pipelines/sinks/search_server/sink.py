"""Search server sink: writes the tables of a sink into OpenSearch or Elasticsearch, one index per table.

`apply` writes the documents of a batch, but searches do not see them yet, because indexes refresh only on request.
`publish` makes them visible, then replaces the published record. So a reader that finds position X in the record also
finds every row up to X. After a crash, documents that were not published stay invisible until the next cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from cdc.config import DeadLetterSettings, SearchSinkDefinition
from cdc.errors import CdcError, SinkFenced, SinkUnavailable
from cdc.failpoint import hit
from cdc.table import TableSchema
from cdc.targets.dead_letter_rows import Image
from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.document_scan import close_point, open_point
from cdc.targets.search_server.index_names import number_of
from cdc.targets.search_server.sink_state import PublishedState, published_indexes
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.sinks.contract import (
    NONE_PARKED,
    Published,
    RefusedParts,
    RefusedRow,
    SchemasAt,
    TableBatch,
    TableRecord,
    no_schemas,
)
from pipelines.sinks.record_after_batch import WHOLE, applied_state, is_done, key_required
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search_server.document_lines import TableIndex
from pipelines.sinks.search_server.executor_writer import MAX_MOVED, DriverRows, ExecutorRows, ExecutorWriter
from pipelines.sinks.search_server.publisher import Publisher, open_publisher
from pipelines.sinks.search_server.row_writer import PlannedRows, RowWriter, open_row_writer
from pipelines.sinks.search_server.table_indexes import TableIndexes
from pipelines.sinks.unpublished_parked_rows import UnpublishedParkedRows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class _Connection:
    """What the sink uses while it is open."""

    client: SearchClient
    rows: RowWriter
    indexes: TableIndexes
    publisher: Publisher


class SearchServerSink:
    """Implements pipelines.sinks.contract.ParkingSink and ExecutorSink; each table has an index on a search server.

    Applying a batch twice has the same effect as applying it once, because every document has the position of its
    change as version. The sink refuses tables without a key, because each document needs an id.
    """

    parallel = 1
    """1, because one batch already uses several requests at once."""
    parallel_from = 0

    def __init__(self, sink: SearchSinkDefinition, *, staged: bool = False) -> None:
        """staged: whether to build new indexes next to the published ones, without aliases."""
        self.name = sink.name
        self.parked = UnpublishedParkedRows()
        self._sink, self._access, self._staged = sink, sink.access, staged
        self._published: Mapping[int, str] = {}
        """For a staged sink, relation → the published index."""
        self._shapes = DocumentShapes(sink, sink.rules)
        self.max_moved = MAX_MOVED
        """See ExecutorWriter.max_moved."""
        self._opened: _Connection | None = None
        self._touched: dict[int, TableIndex] = {}
        self._bases: set[str] = set()
        """Ids of documents of the state that the next publish makes needless."""
        self._aliases: dict[str, tuple[str, int]] | None = None
        self._taken: set[str] = set()
        """Aliases that an index of another owner has; the next batch of their tables stops these tables."""

    def attach(self, spark: SparkSession) -> None:
        """Ignore the Spark session; a batch on the executors has its own."""

    def open(
        self,
        log_id: str,
        schemas_at: SchemasAt = no_schemas,  # noqa: ARG002 - rows and record are published together
    ) -> Published | None:
        """Connect to the server and return the published record; None if nothing was published.

        Raises SinkOfAnotherLog if the sink's indexes belong to another log, and errors of the connection.
        """
        self.close()
        client = SearchClient(self._access, self._sink.engine)
        try:
            client.check()
            publisher = open_publisher(
                client, staged_name(self.name) if self._staged else self.name, log_id, self.parked
            )
            rows = open_row_writer(client, self._access, self.name)
            indexes = TableIndexes(client, self._access, (log_id, self.name), rows.writer)
            self._opened = _Connection(client, rows, indexes, publisher)
            if self._staged:
                self._published = published_indexes(client, self.name)
            elif publisher.record is not None:
                self._sync_aliases(publisher.record)
        except BaseException:
            client.close()
            self._opened = None
            raise
        return publisher.record

    def parking_limits(self, schema: TableSchema) -> DeadLetterSettings:
        """See ParkingSink.parking_limits. For a table without a key, no row is parked: `apply` refuses the table."""
        return self._sink.dead_letters if self._shapes.parks_rows(schema) else NONE_PARKED

    def image_mask(self, schema: TableSchema) -> Callable[[Image], Image]:
        """See ParkingSink.image_mask."""
        return self._shapes.of(schema).parked_image

    def keeps_history(self, schema: TableSchema) -> bool:  # noqa: ARG002 - an index has only current rows
        """See ParkingSink.keeps_history."""
        return False

    def target_position(self, schema: TableSchema) -> int:  # noqa: ARG002 - parked rows are written by `publish`
        """See ParkingSink.target_position."""
        return 0

    def find_refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:  # noqa: ARG002 - one pass finds all
        """Return the rows of a batch that the server refuses; the list may be longer than `limit`.

        Only the server knows which documents it refuses, so this method writes the other rows. `apply` writes them
        again, which changes nothing, and no search sees them before `publish`.
        """
        if batch.rows is None or not batch.schema.key:
            return []
        refused = self._write(batch, batch.rows, self._index(batch))
        return [RefusedRow(number, error) for number, error in sorted(refused.items())]

    def takes_parts(self, schema: TableSchema) -> bool:
        """See ExecutorSink.takes_parts. Executors write every table that the sink does not refuse."""
        return bool(schema.key)

    def find_refused_in_parts(self, batch: TableBatch, limit: int) -> RefusedParts:
        """See ExecutorSink.find_refused_in_parts; as `find_refused`, this method writes the other rows."""
        if batch.parts is None:
            return RefusedParts(FOLDED_ARROW.empty_table(), is_complete=True)
        table = self._index(batch)
        if batch.rows is not None:
            # executors may replace the documents that complete the rows on the driver, which are written later
            self._connection().rows.store_bases(self._plan(batch, batch.rows, table))
        with self._writing_by_executors(replace(batch, rows=None), batch.parts, table) as (writer, moved):
            rows = writer.refused(batch.parts, moved, limit)
        return RefusedParts(rows, is_complete=rows.num_rows <= limit)

    def apply(self, batch: TableBatch) -> TableRecord:
        """Write the documents of a batch of one table, and return the table's new record.

        A batch whose end is published changes nothing; the same is true if the table failed before the batch. Raises
        MissingBase and DocumentRefused for rows that cannot be written. Other rows may then be written, but invisible.
        """
        current = self._connection().publisher.record_of(batch.schema.relation)
        if current is not None and is_done(current, batch):
            return current
        table = self._index(batch)
        of_executors = batch.frame if batch.parts is None else batch.parts
        if of_executors is not None:
            with self._writing_by_executors(batch, of_executors, table) as (writer, of_driver):
                writer.write(of_executors, of_driver)
        elif batch.rows is not None and batch.rows.num_rows:
            refused = self._write(batch, batch.rows, table)
            if refused:
                raise refused[min(refused)]
        self._raise_floor(batch, table)
        self._touched[batch.schema.relation] = table
        return TableRecord(
            relation=batch.schema.relation,
            topic=batch.schema.topic,
            target=table.index,
            position=batch.upto,
            version=None,
            state=applied_state(batch, current, complete=True).value,
            schema=batch.schema.to_json().decode(),
        )

    def publish(self, record: Published) -> None:
        """Make the applied rows visible, then replace the published record.

        Raises SinkFenced if another driver published.
        """
        opened = self._connection()
        opened.publisher.check(record)
        hit("search_before_refresh")
        opened.indexes.refresh(table.index for table in self._touched.values())
        self._sync_aliases(record)
        hit("search_before_commit")
        try:
            before = opened.publisher.replace(record, self._access.keep_tombstones)
        except SinkFenced:
            if opened.publisher.record is not None:
                self._sync_aliases(opened.publisher.record)
            raise
        hit("search_after_commit")
        opened.publisher.remove_unused(before, sorted(self._bases))
        self._remove_tombstones(before)
        self._touched, self._bases = {}, set()

    def adopt(self, staged: SearchServerSink, built: Iterable[int], record: Published) -> None:
        """Publish the indexes that a staged sink has built.

        built: the relations of their tables. record: names these indexes, and those of the other tables.

        Raises SinkFenced if another driver published since this sink was opened.
        """
        self._connection().publisher.floors |= staged._connection().publisher.floors
        for relation in built:
            self.parked.confirm(relation, staged.parked.rows_of(relation))
        self.publish(record)

    def pin(self, record: Published) -> str:
        """Keep the published cut readable; return the points in time of its indexes, and its state, as JSON."""
        opened = self._connection()
        indexes = sorted({table.target for table in record.tables.values() if table.target})
        state = opened.publisher.state
        points = {index: open_point(opened.client, index) for index in indexes}
        return json.dumps({"points": points, "state": None if state is None else state.to_source()})

    def release(self, handle: str) -> None:
        """Release the points in time of a pinned cut; an unknown handle is ignored."""
        try:
            points = json.loads(handle)["points"]
        except (ValueError, TypeError, KeyError):
            return
        for point in points.values():
            close_point(self._connection().client, point)

    def close(self) -> None:
        """Close the connections; rows that were applied and not published stay invisible."""
        if self._opened is not None:
            self._opened.client.close()
        self._opened = None
        self._touched, self._bases, self._aliases, self._taken = {}, set(), None, set()

    def _connection(self) -> _Connection:
        if self._opened is None:
            raise SinkUnavailable(f"sink {self.name!r} is not open")
        return self._opened

    def _index(self, batch: TableBatch) -> TableIndex:
        schema, opened = batch.schema, self._connection()
        if not schema.key:
            raise key_required(schema)
        current = opened.publisher.record_of(schema.relation)
        index = None if current is None or not current.target else current.target
        alias = opened.indexes.alias(schema)
        if alias in self._taken:
            opened.indexes.check_free(alias)
            self._taken, self._aliases = self._taken - {alias}, None
        earlier = self._published.get(schema.relation)
        number = 1 if earlier is None else number_of(earlier) + 1
        table = opened.indexes.of(self._shapes.of(schema), index, number)
        return replace(table, floor=opened.publisher.floors.get(table.index, 0))

    def _write(self, batch: TableBatch, rows: pa.Table, table: TableIndex) -> dict[int, CdcError]:
        """Write rows, and return row number → error of each row that cannot be written."""
        opened = self._connection()
        planned = self._plan(batch, rows, table)
        opened.publisher.declare(batch.upto)
        if planned.bases_id:
            self._bases.add(planned.bases_id)
        hit("search_before_rows")
        refused = opened.rows.write(planned, table)
        hit("search_after_rows")
        return refused

    def _plan(self, batch: TableBatch, rows: pa.Table, table: TableIndex) -> PlannedRows:
        since = self._published_position(batch)
        return self._connection().rows.plan(rows, table, since, is_copying=batch.is_copying)

    @contextmanager
    def _writing_by_executors(
        self, batch: TableBatch, of_executors: ExecutorRows, table: TableIndex
    ) -> Iterator[tuple[ExecutorWriter, DriverRows]]:
        """Yield what writes the rows of a batch on the executors, and the rows that the driver writes of it."""
        opened, since = self._connection(), self._published_position(batch)
        writer = ExecutorWriter(
            self._access, self._sink.engine, self.name, table, since, batch.is_copying, self.max_moved
        )
        opened.publisher.declare(batch.upto)
        of_driver = writer.driver_rows(of_executors, batch.rows, opened.rows)
        if of_driver.planned.bases_id:
            self._bases.add(of_driver.planned.bases_id)
        hit("search_before_rows")
        yield writer, of_driver
        hit("search_after_rows")

    def _published_position(self, batch: TableBatch) -> int:
        current = self._connection().publisher.record_of(batch.schema.relation)
        return -1 if current is None else current.position

    def _raise_floor(self, batch: TableBatch, table: TableIndex) -> None:
        truncated = 0 if batch.truncated is None else batch.truncated[0]
        floor = max(table.floor, truncated, batch.generation or 0)
        if floor > table.floor:
            self._connection().publisher.floors[table.index] = floor

    def _sync_aliases(self, record: Published) -> None:
        """Set the aliases of the tables of a record, if they changed; a staged sink has none.

        The index of a table that the record before had, and this one has not, loses its alias.
        """
        if self._staged:
            return
        opened = self._connection()
        newest: dict[str, TableRecord] = {}
        for table in sorted(record.tables.values(), key=lambda table: table.relation):
            if table.target and table.schema is not None:
                alias = opened.indexes.alias(TableSchema.from_json(table.schema))
                # a table that was created again replaces the earlier one when its copy has ended
                if alias not in newest or table.state in WHOLE:
                    newest[alias] = table
        floors = opened.publisher.floors
        wanted = {alias: (table.target, floors.get(table.target, 0)) for alias, table in newest.items()}
        if wanted != self._aliases:
            named = {table.target for table in record.tables.values()}
            before = {} if self._aliases is None else self._aliases
            left = {alias: index for alias, (index, _) in before.items() if alias not in wanted and index not in named}
            self._taken = opened.indexes.sync_aliases(wanted, left)
            self._aliases = wanted

    def _remove_tombstones(self, before: PublishedState | None) -> None:
        """Remove the documents of rows that were deleted so long ago that no delayed request can be older."""
        opened = self._connection()
        state = opened.publisher.state
        if state is None or before is None or not before.marks or before.marks[0] == state.marks[0]:
            return
        for table in state.record.tables.values():
            if table.target:
                opened.indexes.remove_tombstones(table.target, state.marks[0][1], state.floor(table.target))


def staged_name(sink: str) -> str:
    """Return the name under which the state of a staged sink is stored."""
    return f"{sink}.replay"
