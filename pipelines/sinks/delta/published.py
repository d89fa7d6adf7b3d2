"""Published record of a Delta sink: a Delta table with one row per cut, and the fence against a second driver.

Every publish adds a row in one commit that carries the sink's `txn`; the newest row is the sink's current cut. From
time to time one more commit removes the rows of cuts that are no longer kept. The driver remembers the version that it
wrote or opened; the next commit is made from exactly that snapshot or not at all.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal, Self

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.schema import Schema

from cdc.errors import CutUnderOtherRules, SinkFenced, SinkOfAnotherLog
from cdc.failpoint import hit
from cdc.position import Position
from cdc.stores.cut_retention import kept_cuts
from cdc.stores.lake import PUBLISHED_AT, PUBLISHED_SCHEMA, read_published
from cdc.stores.published import Published, TableRecord, TargetState
from cdc.table import TableSchema
from pipelines.sinks.delta.delta_log import is_newest, remove_old_commits
from pipelines.sinks.delta.target import CHECKPOINT_EVERY

CLEAN_EVERY: Final = 100
"""Publishes between two clean-ups, which drop expired cuts and remove overwritten files."""
TRUSTED_FOR: Final = 60.0
"""Seconds after a publish in which an open table still finds every later commit, or a checkpoint beyond."""

_PROPERTIES: Final = {
    "delta.checkpointInterval": str(CHECKPOINT_EVERY),
    "delta.enableExpiredLogCleanup": "true",
    # at ten publishes a second an hour of history is 36,000 files
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}
_Mode = Literal["append", "overwrite"]
_LOG_ID: Final = "cdc.log_id"
_APP_ID: Final = "cdc.app_id"


@dataclass(frozen=True, slots=True)
class KeptCut:
    """A row of the table."""

    published_at: int
    """µs since 1970 UTC, unique; 0 for a row that is older than the column."""
    record: Published
    """Without schemas: a reader of a past cut finds the columns in the target."""
    text: str
    """The record's JSON."""

    @classmethod
    def of(cls, published_at: int, record: Published) -> Self:
        """The row of a record."""
        slim = replace(record, tables={r: replace(table, schema=None) for r, table in record.tables.items()})
        return cls(published_at, slim, slim.to_json())

    def without(self, targets: Collection[str], now: Position) -> KeptCut:
        """The cut without the versions of these targets, whose rules differ from the cut at `now` on."""
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
    """The published record and the kept cuts, as one driver has them open."""

    def __init__(self, uri: str, table: DeltaTable, retain: float | None) -> None:
        """retain: seconds for which cuts are kept; None: this driver publishes rarely and removes none."""
        self._uri, self._table, self._retain = uri, table, retain
        configuration = table.metadata().configuration
        self.log_id = str(configuration[_LOG_ID])
        self._app_id = str(configuration[_APP_ID])
        self._version = table.version()
        self._position = table.transaction_version(self._app_id)
        self._seen_at = time.monotonic()
        self._cuts = _read_cuts(table)

    @classmethod
    def open(cls, uri: str, log_id: str, retain: float | None = None) -> Self:
        """Open or create the table; raises SinkOfAnotherLog when it belongs to another log."""
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
        return cls(uri, table, retain)

    @property
    def cuts(self) -> Sequence[KeptCut]:
        """The cuts that a reader can choose, oldest first; the last one is that of the record."""
        return self._cuts

    def record(self) -> Published | None:
        """The record that this driver opened or wrote last."""
        return read_published(self._table)

    def write(self, record: Published, forgotten: Collection[str] = ()) -> None:
        """Add the record as the newest one.

        forgotten: targets that earlier cuts no longer show, because their rows were made under other rules. Raises
        SinkFenced when another driver wrote since, or when the position would decrease.
        """
        seen = self.check()
        if self._position is not None and record.position < self._position:
            raise SinkFenced(
                f"the sink at {self._uri!r} cannot publish position {Position(record.position)}, because it already "
                f"published {Position(self._position)}"
            )
        published_at = max(time.time_ns() // 1000, self._cuts[-1].published_at + 1 if self._cuts else 0)
        newest = KeptCut(published_at, record, record.to_json())
        if forgotten:
            self._cuts = [cut.without(forgotten, Position(record.position)) for cut in self._cuts]
            self._commit(seen, _rows([*self._cuts, newest]), record, "overwrite")
        else:
            self._commit(seen, _rows([newest]), record, "append")
        self._cuts.append(KeptCut.of(published_at, record))
        if self._retain is not None and self._version % CLEAN_EVERY == 0:
            self._clean(record, self._retain)

    def _commit(self, seen: DeltaTable, rows: pa.Table, record: Published, mode: _Mode) -> None:
        # no retries: a retry would commit on top of the commit of another driver
        mark = CommitProperties(max_commit_retries=0, app_transactions=[Transaction(self._app_id, record.position)])
        try:
            write_deltalake(seen, rows, mode=mode, commit_properties=mark)
        except CommitFailedError as exc:
            raise SinkFenced(f"another driver published to the sink at {self._uri!r} at the same moment") from exc
        self._table, self._version, self._position = seen, seen.version(), record.position
        self._seen_at = time.monotonic()

    def check(self) -> DeltaTable:
        """The table, unchanged since this driver last wrote or opened it; raises SinkFenced otherwise."""
        if is_newest(self._uri, self._version):
            return self._table
        seen = self._newest()
        if seen.version() != self._version or seen.transaction_version(self._app_id) != self._position:
            raise SinkFenced(
                f"another driver published to the sink at {self._uri!r}: "
                f"expected version {self._version!r}, got {seen.version()!r}"
            )
        return seen

    def _newest(self) -> DeltaTable:
        """The newest version; the table is reopened before the commits after ours can have been removed."""
        if time.monotonic() - self._seen_at > TRUSTED_FOR:
            return DeltaTable(self._uri)
        self._table.update_incremental()
        return self._table

    def _clean(self, record: Published, retain: float) -> None:
        stay = set(kept_cuts([cut.published_at for cut in self._cuts], self._cuts[-1].published_at, retain))
        kept = [cut for cut in self._cuts if cut.published_at in stay]
        rows = _rows([*kept[:-1], replace(kept[-1], text=record.to_json())])
        self._commit(self.check(), rows, record, "overwrite")
        self._cuts = kept
        hit("delta_cuts_thinned")
        self._table.vacuum(retention_hours=1, enforce_retention_duration=False, dry_run=False)
        # an open table keeps every commit that it has replayed in memory
        self._table = DeltaTable(self._uri)
        if self.record() != record:
            raise SinkFenced(f"another driver published to the sink at {self._uri!r} during clean-up")
        self._version = self._table.version()
        remove_old_commits(self._uri, self._version, kept=CLEAN_EVERY)


class LastPublished:
    """The record that this driver published last, or found when it opened; what was only applied does not count.

    A batch that is tried again starts from it once more.
    """

    def __init__(self) -> None:
        self.position = 0
        self.records: Mapping[int, TableRecord] = {}
        """By relation."""
        self.versions: Mapping[str, int] = {}
        """Versions of the targets, by URI."""

    def remember(self, record: Published) -> None:
        """Make the record the last published one."""
        self.position, self.records, self.versions = record.position, dict(record.tables), record.versions

    def schema_of(self, relation: int) -> TableSchema | None:
        """A table as it was when it was last published, None if it never was."""
        record = self.records.get(relation)
        return None if record is None or record.schema is None else _schema_of(record.schema)

    def range_start(self, after: int) -> int:
        """The position after which the rows of a batch begin: at most that of the published cut.

        A crash may leave one target ahead of the others; its table is then folded from the cut like theirs.
        """
        return min(after, self.position) if self.records else after


@lru_cache(maxsize=1024)
def _schema_of(payload: str) -> TableSchema:
    """The same payload is read with every batch."""
    return TableSchema.from_json(payload)


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


def _create(uri: str, log_id: str) -> None:
    try:
        DeltaTable.create(
            uri,
            PUBLISHED_SCHEMA,
            description="published cuts of a cdc sink: one row per kept cut",
            configuration={**_PROPERTIES, _LOG_ID: log_id, _APP_ID: str(uuid.uuid4())},
            raise_if_key_not_exists=False,
        )
    except DeltaError:
        # another driver created it at the same moment; the fence refuses one of the two
        if not DeltaTable.is_deltatable(uri):
            raise
