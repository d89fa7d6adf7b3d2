"""Published cuts of a Delta sink: a Delta table with one row per cut. A second driver cannot publish.

Every publish adds one row, in a commit with the sink's `txn` action. The newest row is the sink's current cut. From
time to time one more commit removes the rows of cuts that are no longer kept. The driver remembers the table version
that it last wrote or opened. Its next commit fails if the table has another version by then.

A publish writes its data file and its commit itself, in about 1 ms; delta-rs takes ten times as long.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.schema import Schema

from cdc import atomic_file
from cdc.delta_protocol.actions import add_action, commit_info, txn_action
from cdc.delta_protocol.commits import create_commit
from cdc.delta_protocol.table_storage import storage_of
from cdc.errors import CutUnderOtherRules, SinkFenced, SinkOfAnotherLog
from cdc.failpoint import hit
from cdc.log.computed_views import cut_of_commit
from cdc.position import Position
from cdc.table import TableSchema
from cdc.target_names import record_of_views
from cdc.targets.cut_retention import kept_cuts
from cdc.targets.lake_reader import PUBLISHED_AT, PUBLISHED_SCHEMA, list_cuts, read_published
from cdc.targets.published_record import Published, TableRecord, TargetState
from pipelines.sinks.delta.commit_sync import sync_commits
from pipelines.sinks.delta.damaged_commits import remove_damaged_newest
from pipelines.sinks.delta.delta_log_cleanup import CHECKPOINT_EVERY, is_newest, remove_old_commits, write_checkpoint
from pipelines.sinks.delta.indexed.delta_log import LiveFile, LiveFiles, new_data_path
from pipelines.sinks.delta.new_data_files import statistics
from pipelines.sinks.delta.table_properties import create_table

CLEAN_EVERY: Final = 100
"""Number of publishes from one clean-up to the next; a clean-up removes expired cuts and overwritten files."""
TRUSTED_FOR: Final = 60.0
"""Seconds since the last commit of the driver for which it trusts that no old commit of an object store was removed."""

_PROPERTIES: Final = {
    "delta.checkpointInterval": str(CHECKPOINT_EVERY),
    "delta.enableExpiredLogCleanup": "true",
    # at ten publishes a second an hour of history is 36,000 files
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}
MICROS: Final = 1_000_000
_LOG_ID: Final = "cdc.log_id"
_APP_ID: Final = "cdc.app_id"


@dataclass(frozen=True, slots=True)
class KeptCut:
    """One row of the table of published cuts."""

    published_at: int
    """Time of the publish in µs since 1970 UTC, unique per cut; 0 for a row that an older version of cdc wrote."""
    record: Published
    """The published record; records that were read from the table have no schemas, except the newest one."""
    text: str
    """The published record as JSON; only that of the newest cut contains the schemas of its tables."""

    @classmethod
    def of(cls, published_at: int, record: Published) -> Self:
        """Create the KeptCut of a published record, with its JSON without the schemas of its tables."""
        return cls(published_at, record, record.to_json(with_schemas=False))

    def without(self, targets: Collection[str], now: Position) -> KeptCut:
        """Return the cut with the tables of these targets marked as failed and without a version.

        Readers of the cut then get no rows that were written under rules that are no longer valid. now: the position of
        the first cut under the current rules.
        """
        gone = CutUnderOtherRules(
            f"the rows of this cut were written under other rules than those in effect since {now}"
        )
        why = f"{gone.code} {gone.message}"
        tables = {
            relation: replace(table, version=None, state=TargetState.FAILED.value, reason=why)
            if table.target in targets
            else table
            for relation, table in self.record.tables.items()
        }
        return KeptCut.of(self.published_at, replace(self.record, tables=tables))


class PublishedTable:
    """The table of published cuts of one Delta sink, opened for writing by one driver."""

    def __init__(self, uri: str, table: DeltaTable, retain: float | None) -> None:
        """retain: seconds for which cuts are kept; None: this driver removes no cuts."""
        self._uri, self._storage, self._retain = uri, storage_of(uri), retain
        configuration = table.metadata().configuration
        self.log_id = str(configuration[_LOG_ID])
        self._app_id = str(configuration[_APP_ID])
        self._version = table.version()
        self._position = table.transaction_version(self._app_id)
        self._seen_at = time.monotonic()
        self._cuts, self._record = _read_cuts(table), read_published(table)

    @classmethod
    def open(cls, uri: str, log_id: str, retain: float | None = None) -> Self:
        """Open or create the table of published cuts at uri; raises SinkOfAnotherLog if it belongs to another log."""
        remove_damaged_newest(uri)
        if not DeltaTable.is_deltatable(uri):
            _create(uri, log_id)
        table = DeltaTable(uri)
        found = table.metadata().configuration.get(_LOG_ID)
        if found is None:
            raise SinkOfAnotherLog(
                f"Delta table {uri!r} is not the published record of a sink: property {_LOG_ID!r} is missing",
                remedy="point the sink at another path, or move that table to another directory",
            )
        if found != log_id:
            raise SinkOfAnotherLog(f"the sink at {uri!r} belongs to log {found!r}: expected log {log_id!r}")
        known = {field.name for field in table.schema().fields}
        if missing := [field for field in PUBLISHED_SCHEMA if field.name not in known]:
            table.alter.add_columns(Schema.from_arrow(pa.schema(missing)).fields)
            sync_commits(uri, table.version() - 1, table.version())
        return cls(uri, table, retain)

    @property
    def cuts(self) -> Sequence[KeptCut]:
        """The cuts that a reader can choose, oldest first; the last cut is the current cut of the sink."""
        return self._cuts

    def record(self) -> Published | None:
        """Return the newest record as of this driver's last write or opening, None if nothing was published."""
        return self._record

    def write(self, record: Published, forgotten: Collection[str] = (), unsynced: Collection[Path] = ()) -> None:
        """Publish a record durably: add it to the table as the newest row.

        forgotten: URIs of targets that earlier cuts must no longer show, because these cuts follow earlier rules.
        unsynced: files and directories that are synced to the disk before the record becomes visible.
        Raises SinkFenced if another driver wrote to the table, or if the position of the sink would decrease.
        """
        self.check()
        if self._position is not None and record.position < self._position:
            raise SinkFenced(
                f"the sink at {self._uri!r} cannot publish position {Position(record.position)}, because it already "
                f"published {Position(self._position)}"
            )
        published_at = max(time.time_ns() // 1000, self._cuts[-1].published_at + 1 if self._cuts else 0)
        newest = KeptCut(published_at, record, record.to_json())
        if forgotten:
            self._cuts = [cut.without(forgotten, Position(record.position)) for cut in self._cuts]
            self._commit([*self._cuts, newest], record, self._stored_files(), unsynced)
        else:
            self._commit([newest], record, [], unsynced)
            if self._version % CHECKPOINT_EVERY == 0:
                write_checkpoint(self._uri, self._version)
        self._cuts.append(KeptCut.of(published_at, record))
        if self._retain is not None and self._version % CLEAN_EVERY == 0:
            self._clean(record, self._retain)

    def check(self) -> None:
        """Raise SinkFenced if another driver wrote to the table since this driver opened or wrote it.

        In an object store, this is only checked after a pause: a commit fails anyway if its version exists, unless old
        commits were removed meanwhile.
        """
        recent = time.monotonic() - self._seen_at <= TRUSTED_FOR
        if recent if "://" in self._uri else is_newest(self._uri, self._version):
            return
        seen = DeltaTable(self._uri)
        if seen.version() != self._version or seen.transaction_version(self._app_id) != self._position:
            raise SinkFenced(
                f"another process published to the sink at {self._uri!r}: "
                f"expected version {self._version!r}, got {seen.version()!r}"
            )

    def _commit(
        self, cuts: Sequence[KeptCut], record: Published, removed: Iterable[LiveFile], unsynced: Collection[Path] = ()
    ) -> None:
        """Add rows, and remove files, in a durable commit of our own; raise SinkFenced if another driver was faster.

        record: the newest cut, with the schemas of its tables.
        """
        rows, content, path = _rows(cuts), pa.BufferOutputStream(), new_data_path()
        pq.write_table(rows, content, compression="snappy")
        written = content.getvalue()
        self._storage.write(path, written)
        # readers find the newest record by the statistics of `published_at`
        add = add_action(path, written.size, statistics(rows, ("position", "committed_at", PUBLISHED_AT)))
        txn = txn_action(self._app_id, record.position)
        actions = [commit_info("WRITE", engineInfo="cdc"), txn, *(file.remove() for file in removed), {"add": add}]
        own = set[Path]() if "://" in self._uri else {Path(self._uri), Path(self._uri) / path}
        atomic_file.sync_all(own.union(unsynced))
        try:
            create_commit(self._storage.create_durably, self._version + 1, actions)
        except FileExistsError as exc:
            raise self._fenced_error() from exc
        self._confirm(self._version + 1, record)

    def _stored_files(self) -> list[LiveFile]:
        """Return the data files of the table; raise SinkFenced if another driver committed to the table."""
        files = LiveFiles.read(self._storage)
        if files.version != self._version:
            raise self._fenced_error()
        return [*files.by_path.values()]

    def _fenced_error(self) -> SinkFenced:
        return SinkFenced(f"another process published to the sink at {self._uri!r} at the same moment")

    def _confirm(self, version: int, record: Published) -> None:
        self._version, self._position, self._record = version, record.position, record
        self._seen_at = time.monotonic()

    def _clean(self, record: Published, retain: float) -> None:
        now = self._cuts[-1].published_at
        stay = set(kept_cuts([cut.published_at for cut in self._cuts], now, retain))
        # views have fewer cuts than their tables: a query of both needs the tables at the positions of these cuts
        joined = _positions_of_views(self._uri)
        kept = [
            cut
            for cut in self._cuts
            if cut.published_at in stay
            or (now - cut.published_at <= retain * MICROS and cut_of_commit(cut.record.position) in joined)
        ]
        self.check()
        self._commit([*kept[:-1], replace(kept[-1], text=record.to_json())], record, self._stored_files())
        self._cuts = kept
        hit("delta_cuts_thinned")
        table = DeltaTable(self._uri)
        table.vacuum(retention_hours=1, enforce_retention_duration=False, dry_run=False)
        table = DeltaTable(self._uri)
        if read_published(table) != record:
            raise SinkFenced(f"another process published to the sink at {self._uri!r} during clean-up")
        sync_commits(self._uri, self._version, table.version())
        self._version = table.version()
        if "://" in self._uri:
            table.cleanup_metadata()
        remove_old_commits(self._uri, self._version, kept=CLEAN_EVERY)


class LastPublished:
    """The record that this driver published last, or read when it opened the sink.

    Batches that were applied and not yet published do not change this object.
    """

    def __init__(self) -> None:
        self.position = 0
        self.records: Mapping[int, TableRecord] = {}
        """Relation → record of its table in the last published record."""
        self.versions: Mapping[str, int] = {}
        """URI of a target → its Delta version in the last published record."""

    def remember(self, record: Published) -> None:
        """Store this record as the last published record."""
        self.position, self.records, self.versions = record.position, dict(record.tables), record.versions

    def schema_of(self, relation: int) -> TableSchema | None:
        """Return the schema of a table in the last published record, None if the record does not have it."""
        record = self.records.get(relation)
        return None if record is None or record.schema is None else TableSchema.from_json(record.schema)

    def range_start(self, after: int) -> int:
        """Return the position after which a batch reads the log: `after`, or the published position if that is lower.

        A crash may leave one target ahead of the published cut. Its table is then folded from the cut again.
        """
        return min(after, self.position) if self.records else after


def _rows(cuts: Sequence[KeptCut]) -> pa.Table:
    columns = [
        [cut.record.position for cut in cuts],
        [cut.record.committed_at for cut in cuts],
        [cut.text for cut in cuts],
        [cut.published_at for cut in cuts],
    ]
    return pa.table(dict(zip(PUBLISHED_SCHEMA.names, columns, strict=True)), schema=PUBLISHED_SCHEMA)


def _read_cuts(table: DeltaTable) -> list[KeptCut]:
    rows = pa.table(table.scan(columns=[PUBLISHED_AT, "record"])).to_pylist()
    cuts = [KeptCut.of(row[PUBLISHED_AT] or 0, Published.from_json(row["record"])) for row in rows]
    return sorted(cuts, key=lambda cut: cut.published_at)


def _positions_of_views(uri: str) -> set[int]:
    """Return the positions of the cuts that the views next to a sink of tables have; empty without such views."""
    views = record_of_views(uri)
    if not DeltaTable.is_deltatable(views):
        return set()
    return {cut_of_commit(cut.position) for cut in list_cuts(DeltaTable(views))}


def _create(uri: str, log_id: str) -> None:
    # if another driver creates it at the same moment, `check` later refuses one of the two drivers
    with suppress(CommitFailedError):
        create_table(
            uri,
            PUBLISHED_SCHEMA,
            description="published cuts of a cdc sink: one row per kept cut",
            configuration={**_PROPERTIES, _LOG_ID: log_id, _APP_ID: str(uuid.uuid4())},
        )
