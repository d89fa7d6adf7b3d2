"""PublishedTable: the one-row Delta table in which a Delta sink records its cut, and the fence on it.

Every publish overwrites the row in one commit that carries the sink's `txn`. The driver remembers
the version it wrote or opened; the next commit is made from exactly that snapshot or not at all.
"""

from __future__ import annotations

import time
import uuid
from typing import Final, Self

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from cdc.errors import SinkBelongsElsewhere, SinkFenced
from cdc.stores.lake import PUBLISHED_SCHEMA, read_published
from cdc.stores.published import Published

CLEAN_EVERY: Final = 100
"""Publishes between two removals of overwritten files."""
TRUSTED_FOR: Final = 60.0
"""Seconds after a publish in which an opened table surely finds every later commit: those are kept for an hour."""

_PROPERTIES: Final = {
    "delta.checkpointInterval": str(CLEAN_EVERY),
    "delta.enableExpiredLogCleanup": "true",
    # at ten publishes a second an hour of history is 36,000 files
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}
_LOG_ID: Final = "cdc.log_id"
_APP_ID: Final = "cdc.app_id"


class PublishedTable:
    """The record as one driver holds it."""

    def __init__(self, table: DeltaTable) -> None:
        self._table = table
        configuration = table.metadata().configuration
        self.log_id = str(configuration[_LOG_ID])
        self._app_id = str(configuration[_APP_ID])
        self._version = table.version()
        self._position = table.transaction_version(self._app_id)
        self._seen_at = time.monotonic()

    @classmethod
    def open(cls, uri: str, log_id: str) -> Self:
        """Open or create; raises SinkBelongsElsewhere when the record is another log's."""
        if not DeltaTable.is_deltatable(uri):
            _create(uri, log_id)
        table = DeltaTable(uri)
        found = table.metadata().configuration.get(_LOG_ID)
        if found != log_id:
            raise SinkBelongsElsewhere(f"sink at {uri!r} belongs to log {found!r}: expected {log_id!r}")
        return cls(table)

    def record(self) -> Published | None:
        """The record that this driver opened or wrote last."""
        return read_published(self._table)

    def write(self, record: Published) -> None:
        """Replace the record; raises SinkFenced when another driver wrote since, or when it would go back."""
        seen = self.check()
        if self._position is not None and record.position < self._position:
            raise SinkFenced(f"sink at {seen.table_uri!r} stands beyond the record to publish")
        row = pa.table(
            {"position": [record.position], "committed_at": [record.committed_at], "record": [record.to_json()]}
        )
        # no retries: a retry would commit on top of what the fence was to keep out
        mark = CommitProperties(max_commit_retries=0, app_transactions=[Transaction(self._app_id, record.position)])
        try:
            write_deltalake(seen, row.cast(PUBLISHED_SCHEMA), mode="overwrite", commit_properties=mark)
        except CommitFailedError as exc:
            raise SinkFenced(f"sink at {seen.table_uri!r} was published by another driver at the same moment") from exc
        self._table, self._version, self._position = seen, seen.version(), record.position
        self._seen_at = time.monotonic()
        if self._version % CLEAN_EVERY == 0:
            self._clean(record)

    def check(self) -> DeltaTable:
        """The table as it is now, which is as this driver left or found it; raises SinkFenced otherwise."""
        seen = self._newest()
        if seen.version() != self._version or seen.transaction_version(self._app_id) != self._position:
            raise SinkFenced(
                f"sink at {seen.table_uri!r} was published by another driver: "
                f"expected version {self._version!r}, got {seen.version()!r}"
            )
        return seen

    def _newest(self) -> DeltaTable:
        """The table as it is now; opened anew before the commits after ours can have been cleaned away."""
        if time.monotonic() - self._seen_at > TRUSTED_FOR:
            return DeltaTable(self._table.table_uri)
        self._table.update_incremental()
        return self._table

    def _clean(self, record: Published) -> None:
        self._table.vacuum(retention_hours=1, enforce_retention_duration=False, dry_run=False)
        # an opened table keeps every commit it has replayed
        self._table = DeltaTable(self._table.table_uri)
        if self.record() != record:
            raise SinkFenced(f"sink at {self._table.table_uri!r} was published by another driver during clean-up")
        self._version = self._table.version()


def _create(uri: str, log_id: str) -> None:
    try:
        DeltaTable.create(
            uri,
            PUBLISHED_SCHEMA,
            description="where a cdc sink stands: one row, replaced by every publish",
            configuration={**_PROPERTIES, _LOG_ID: log_id, _APP_ID: str(uuid.uuid4())},
            raise_if_key_not_exists=False,
        )
    except DeltaError:
        # another driver made it in the same moment; the fence sorts the two out
        if not DeltaTable.is_deltatable(uri):
            raise
