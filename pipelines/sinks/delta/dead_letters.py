"""Dead letters of a Delta sink: the table of its parked rows, and the search for the rows that a target refuses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from threading import Lock
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake
from deltalake import Schema as DeltaSchema

from cdc.errors import CdcError
from cdc.targets.dead_letter_rows import PARKED_SCHEMA, DeadLetterEntry, Key, ParkedRow, parked_at, read_entries
from cdc.targets.published_record import Published
from pipelines.sinks.contract import RefusedRow, TableBatch
from pipelines.sinks.delta.commit_sync import sync_commits
from pipelines.sinks.delta.damaged_commits import remove_damaged_newest
from pipelines.sinks.delta.erase_earlier_versions import erase_earlier
from pipelines.sinks.delta.history_rows import typed_changes
from pipelines.sinks.delta.merge_source import BaseLookup, has_no_base, source_rows
from pipelines.sinks.delta.table_properties import create_table
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.sinks.delta.target_layout import check_partition_values
from pipelines.sinks.record_after_batch import missing_base
from pipelines.types.failing_rows import failing_rows
from pipelines.types.typed_rows import typed_keys

STALE: Final = 500
"""Minimum number of superseded entries at which `compact` rewrites the dead-letter table without them."""
_KEPT_FOR: Final = 1
"""Hours for which files that `compact` removed from the dead-letter table stay on disk for its readers."""
_PROPERTIES: Final = {
    "delta.checkpointInterval": "100",
    "delta.enableExpiredLogCleanup": "true",
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}


class DeadLetterTable:
    """Implements pipelines.sinks.contract.ParkedRows with one Delta table of entries for all tables of a sink.

    The Delta table is created when the first row is parked.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._table: DeltaTable | None = None
        self._parked: dict[int, Mapping[Key, ParkedRow]] = {}
        self._unlisted: dict[int, list[DeadLetterEntry]] = {}
        """Relation → dead-letter entries of its source table, for tables that were never published. `load_unpublished`
        removes them from here.
        """
        self._entries = 0
        self._synced = -1
        """Version of the Delta table up to which its commits are durable."""
        self._unconfirmed: set[int] = set()
        self._lock = Lock()

    def load(self, record: Published, positions: Mapping[int, int]) -> None:
        """Read the parked rows of the sink, and delete the entries of batches that were never merged.

        positions: relation → position of its target, for each table of the published record.
        """
        self._parked, self._unlisted, self._unconfirmed, self._entries = {}, {}, set(), 0
        remove_damaged_newest(self._uri)
        self._table = DeltaTable(self._uri) if DeltaTable.is_deltatable(self._uri) else None
        self._synced = -1 if self._table is None else self._table.version()
        entries = [] if self._table is None else read_entries(self._table)
        self._entries = len(entries)
        listed = [entry for entry in entries if entry.row.relation in record.tables]
        self._parked = dict(parked_at(listed, record, positions))
        for relation, position in positions.items():
            self._delete_after(relation, position, listed)
        for entry in entries:
            if entry.row.relation not in record.tables:
                self._unlisted.setdefault(entry.row.relation, []).append(entry)

    def load_unpublished(self, relation: int, position: int) -> None:
        """Read the parked rows of a table that was never published; position: the position of its target."""
        entries = self._unlisted.pop(relation, [])
        self._parked |= parked_at(entries, Published(0, 0), {relation: position})
        self._delete_after(relation, position, entries)

    def _delete_after(self, relation: int, position: int, entries: Iterable[DeadLetterEntry]) -> None:
        if self._table is not None and any(e.row.relation == relation and e.row.upto > position for e in entries):
            self._table.delete(_is_after(relation, position))
            self._sync(self._table)

    def rows_of(self, relation: int) -> Mapping[Key, ParkedRow]:
        """See ParkedRows.rows_of."""
        return self._parked.get(relation, {})

    def write(self, relation: int, after: int, entries: Iterable[DeadLetterEntry]) -> None:
        """See ParkedRows.write."""
        rows = [entry.to_json() for entry in entries]
        with self._lock:
            if not rows and relation not in self._unconfirmed:
                return
            self._unconfirmed.add(relation)  # also if the commit fails
            table = self._open_or_create()
            self._add_new_columns(table)
            # entries of an attempt that never merged must not count once a later batch passes its end
            write_deltalake(
                table,
                pa.Table.from_pylist(rows, PARKED_SCHEMA),
                mode="overwrite",
                predicate=_is_after(relation, after),
            )
            self._sync(table)
            self._entries += len(rows)
            (self._unconfirmed.add if rows else self._unconfirmed.discard)(relation)

    def confirm(self, relation: int, rows: Mapping[Key, ParkedRow]) -> None:
        """See ParkedRows.confirm."""
        with self._lock:
            self._unconfirmed.discard(relation)
            self._parked[relation] = rows

    def compact(self) -> None:
        """Rewrite the dead-letter table without superseded entries, if they are the majority and at least STALE.

        Call this method only between two batches.
        """
        live = [row for rows in self._parked.values() for row in rows.values()]
        if self._table is None or self._unconfirmed or self._unlisted or self._entries <= STALE + 2 * len(live):
            return
        rows = [DeadLetterEntry(row).to_json() for row in live]
        write_deltalake(self._open_or_create(), pa.Table.from_pylist(rows, PARKED_SCHEMA), mode="overwrite")
        self._table = DeltaTable(self._uri)
        self._sync(self._table)
        self._table.vacuum(retention_hours=_KEPT_FOR, enforce_retention_duration=False, dry_run=False)
        self._entries = len(rows)

    def rewrite(self, record: Published) -> None:
        """Keep only the entries of rows that are parked according to `record`, and of tables that it does not contain.

        All other entries are removed, and older versions of the dead-letter table are erased.
        """
        self.load(record, {})
        if self._table is None:
            return
        live = [row for rows in self._parked.values() for row in rows.values()]
        entries = [*map(DeadLetterEntry, live), *(entry for unlisted in self._unlisted.values() for entry in unlisted)]
        rows = [entry.to_json() for entry in entries]
        write_deltalake(self._open_or_create(), pa.Table.from_pylist(rows, PARKED_SCHEMA), mode="overwrite")
        self._sync(table := DeltaTable(self._uri))
        erase_earlier(self._uri, table.version())

    def add_rebuilt(self, rows: Iterable[ParkedRow], upto: int, instead_of: Collection[int] = ()) -> None:
        """Add the rows that a replay up to position `upto` parked; call this before the new targets replace the old.

        instead_of: relations of the tables whose earlier entries are removed.
        """
        entries = [DeadLetterEntry(replace(row, upto=upto)).to_json() for row in rows]
        if not entries and not (instead_of and DeltaTable.is_deltatable(self._uri)):
            return
        self._add_new_columns(table := self._open_or_create())
        added = pa.Table.from_pylist(entries, PARKED_SCHEMA)
        if not instead_of:
            write_deltalake(table, added, mode="append")
            self._sync(table)
            return
        gone = pc.is_in(pc.field("relation"), pa.array(sorted(instead_of), pa.int64()))
        others = pa.table(table.scan()).cast(PARKED_SCHEMA).filter(pc.invert(gone))
        write_deltalake(table, pa.concat_tables([others, added]), mode="overwrite")
        self._sync(table)

    def _add_new_columns(self, table: DeltaTable) -> None:
        """Add the columns of PARKED_SCHEMA that a table of an older version of cdc does not have."""
        present = {field.name for field in table.schema().fields}
        missing = [field for field in DeltaSchema.from_arrow(PARKED_SCHEMA).fields if field.name not in present]
        if missing:
            table.alter.add_columns(missing)
            self._sync(table)

    def _sync(self, table: DeltaTable) -> None:
        """Make the commits of the table durable: entries count as soon as the target reaches the end of their batch."""
        sync_commits(self._uri, self._synced, table.version())
        self._synced = table.version()

    def _open_or_create(self) -> DeltaTable:
        if self._table is None:
            self._table = _open_or_create(self._uri)
        else:
            self._table.update_incremental()
        return self._table


def _open_or_create(uri: str) -> DeltaTable:
    if DeltaTable.is_deltatable(uri):
        return DeltaTable(uri)
    described = "rows that a cdc sink refused: entries by batch, see 'cdc dlq'"
    create_table(uri, PARKED_SCHEMA, description=described, configuration=_PROPERTIES)
    return DeltaTable(uri)


def _is_after(relation: int, position: int) -> str:
    return f"relation = {int(relation)} AND upto > {int(position)}"


def refused_rows(
    images: pa.Table, bases: BaseLookup, shape: RowShape, limit: int, check: Callable[[pa.Table, RowShape], None]
) -> list[RefusedRow]:
    """Return the folded rows that the target refuses, not many more than `limit`.

    images: folded rows with op `u` or `d` of a table with a key. The target refuses a value or key that it cannot
    represent, and a partial image without a base row. check: raises ValueNotRepresentable for merge source rows with
    values that the layout of the target cannot have.
    """
    found = failing_rows(images, lambda part: check(source_rows(part, shape), shape), limit)
    partial = pc.and_(pc.equal(images["op"], "u"), pc.invert(pc.fill_null(images["complete"], fill_value=True)))
    rows = np.setdiff1d(np.flatnonzero(partial.to_numpy()), np.fromiter(found, np.int64, len(found)))
    if len(rows):
        found |= _without_base(images, rows, bases, shape)
    return [RefusedRow(row, error) for row, error in sorted(found.items())]


def refused_changes(batch: TableBatch, shape: RowShape, limit: int) -> list[RefusedRow]:
    """Return the rows of a batch with a value or key that a target with history cannot represent.

    Returns not many more than `limit` rows. The rows of `batch.unparked` are numbered after those of `batch.rows`.
    """
    images = [rows for rows in (batch.rows, batch.unparked) if rows is not None]
    found = failing_changes(pa.concat_tables(images), shape, limit) if images else {}
    return [RefusedRow(row, error) for row, error in sorted(found.items())]


def failing_changes(images: pa.Table, shape: RowShape, limit: int) -> dict[int, CdcError]:
    """Return row number → error, for the changes that a target with history cannot represent; about `limit` at most."""
    return failing_rows(images, lambda part: _typed(part, shape), limit)


def _typed(images: pa.Table, shape: RowShape) -> None:
    check_partition_values(typed_changes(images, shape), shape.partition_texts, shape.schema.topic)
    typed_keys(images["base"].drop_null(), shape.schema, shape.policy)


def _without_base(images: pa.Table, rows: np.ndarray, bases: BaseLookup, shape: RowShape) -> dict[int, CdcError]:
    partial = images.take(pa.array(rows))
    keys = pa.table({"key": pc.coalesce(partial["base"], partial["key"]), "position": partial["position"]})
    untypable = failing_rows(keys, lambda part: typed_keys(part["key"], shape.schema, shape.policy), len(rows))
    known = np.setdiff1d(np.arange(len(rows)), np.fromiter(untypable, np.int64, len(untypable)))
    baseless = known[has_no_base(partial.take(pa.array(known)), bases, shape)] if len(known) else known
    return {
        int(rows[row]): missing_base(shape.schema, partial["position"][int(row)].as_py())
        for row in [*untypable, *baseless]
    }
