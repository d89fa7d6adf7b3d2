"""Source move: continues the log on another server without copying tables, as far as that can be proved.

A server with the system identifier of the log is a promoted standby, or a restore. Its timeline history proves whether
it has all transactions of the log. If so, the reader continues there, and the move has nothing to do.

A server with another system identifier is a cluster of its own: made by pg_upgrade, a logical replica, or a restored
dump. Its WAL positions mean nothing to the log, so the log continues there in a new epoch:

1. A temporary slot on the new server exports a snapshot. From here on writers may write to the new server.
2. The caller compares the rows of each table in the snapshot with the rows of the log. Equal rows prove that the log
   can continue from the slot, however the rows came to the new server.
3. The slot becomes permanent, and one commit begins the epoch. Equal tables stay live and are not copied.

Before step 3 nothing lasts on the new server but the publication. If the process is killed between slot and commit,
the slot record proves that the slot belongs to this log, and the next run replaces the slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from cdc.capture.commit_outside_stream import SnapshotCommit
from cdc.capture.initial_snapshot import Continuation, EarlierTables, StartingSlot, continue_relations
from cdc.capture.operator_recovery import open_log_writer
from cdc.capture.resume_checks import lineage_of
from cdc.capture.settings import SourceSettings, reader_settings
from cdc.capture.slot_belongs_to_log import SlotClaim
from cdc.capture.startup_checks import check_source_ready
from cdc.config import Definition
from cdc.errors import (
    LogFenced,
    SlotAtNewServer,
    SlotNotCreated,
    SlotNotOwned,
    SourceInRecovery,
    StateConflict,
)
from cdc.failpoint import hit
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import begin_snapshot, lock_tables
from cdc.postgres.publication import ensure_publication, published_schemas
from cdc.postgres.replication import identify_system
from cdc.postgres.slot import DraftSlot, copy_lock, create_draft_slot
from cdc.postgres.source_state import read_source_state
from cdc.postgres.tables import match_tables
from cdc.table import TableSchema, TableState

DIFFERED: Final = "its rows differed from the log when the source moved to another cluster"
_ONE_SNAPSHOT: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"


@dataclass(frozen=True, slots=True)
class NewCluster:
    """A cluster of its own on which the log is to continue, readable at the consistent point of a new slot."""

    source: SourceSettings
    tables: Continuation
    schemas: Mapping[int, TableSchema]
    """The latest schema of each relation in the log."""
    position: Position
    """First position of the new epoch: that of the snapshot."""
    conn: Any
    """A connection that has the lock for copying tables with the slot, unless the cluster is only checked."""
    reading: Any
    """A connection inside a transaction that sees the snapshot."""
    writer: LogWriter
    """The log, opened at the position at which the tables are compared; a later commit of another process fences it."""
    slot: StartingSlot
    draft: DraftSlot | None
    """The temporary slot; None if the cluster is only checked."""

    def begin_epoch(self, read_again: Mapping[int, str]) -> None:
        """Make the slot permanent, and begin the epoch.

        read_again: relation → reason, for the tables that the reader copies; other tables keep their state.
        """
        assert self.draft is not None, "a check begins no epoch"  # noqa: S101
        commit = SnapshotCommit(self.writer, self.position)
        for schema in self.tables.copied:
            commit.mark(self._state_of(schema, read_again.get(schema.relation)))
        for schema in self.tables.dropped:
            commit.mark(schema, ended=True)
        for schema in self.tables.uncaptured:
            commit.mark(schema)
        self.slot.keep(self.conn, self.draft)
        hit("before_move_recorded")
        commit.commit(lineage_of(read_source_state(self.source.dsn, self.source.slot, self.source.publication, ())))
        hit("after_move_recorded")

    def _state_of(self, schema: TableSchema, reason: str | None) -> TableSchema:
        """Return the table with the state that it has in the new epoch; reason: why it is read again."""
        if reason is not None:
            return schema.flagged(TableState.SNAPSHOTTING, reason)
        before = self.schemas[schema.relation]
        return replace(schema, state=before.state, reason=before.reason)


@contextmanager
def open_new_cluster(definition: Definition, log: LogReader, *, check: bool) -> Iterator[NewCluster]:
    """Yield the new cluster inside a snapshot; the block compares its tables and begins the epoch.

    definition: names the new cluster as its source. check: True to create and lock nothing.

    Raises SourceInRecovery for a standby, PreflightFailed if the server is not ready for capture, SlotAtNewServer if
    another slot has the name, and StateConflict or SlotNotCreated if the definition does not allow the move.
    """
    source = reader_settings(definition).source
    _check_settings(source)
    identity = identify_system(source.dsn)
    if identity.in_recovery:
        raise SourceInRecovery("the new server is a standby", remedy="promote it, then run the command again")
    check_source_ready(definition)
    writer = open_log_writer(definition)
    if writer.durable != log.durable:
        raise LogFenced(f"another process committed to the log after it was read at position {log.durable!s}")
    slot = StartingSlot(source, SlotClaim.of(definition.log.root, writer), identity)
    past = EarlierTables.of((log.durable or Position(0)).epoch + 1, [schema for _, schema in log.schema_history()])
    with ExitStack() as opened:
        conn = opened.enter_context(connect(source.dsn, application_name="cdc move"))
        _check_slot_name(slot, conn)
        tables = match_tables(conn, source.patterns, source.exclude)
        reading = opened.enter_context(connect(source.dsn, autocommit=False))
        draft = None
        start = identity.wal_end
        if check:
            reading.execute(_ONE_SNAPSHOT)
        else:
            opened.enter_context(copy_lock(conn, source.slot))
            ensure_publication(conn, source.publication, [name for _, name in tables], control=source.control)
            draft = opened.enter_context(create_draft_slot(source.dsn))
            begin_snapshot(reading, draft.snapshot.name)
            start = draft.snapshot.consistent_point
        lock_tables(reading, tables)
        schemas = published_schemas(reading, [oid for oid, _ in tables], source.publication).values()
        plan = continue_relations(past, schemas, {str(name) for _, name in match_tables(reading, ["*"])})
        position = Position.of(start - 1, past.epoch)
        yield NewCluster(source, plan, past.schemas, position, conn, reading, writer, slot, draft)


def _check_settings(source: SourceSettings) -> None:
    if not source.copies_rows:
        raise StateConflict(
            "snapshot.mode is 'no_data', so the log does not contain the rows that would prove the move",
            remedy="set source.dsn to the new server, then run 'cdc slots recover -c FILE --new-epoch'",
        )
    if not source.create_slot:
        raise SlotNotCreated(
            "source.slot.create is false, so the move cannot create a slot on the new server",
            remedy="set source.slot.create to true, then run the command again",
        )


def _check_slot_name(slot: StartingSlot, conn: Any) -> None:
    try:
        slot.check(conn)
    except SlotNotOwned as exc:
        name = slot.source.slot
        raise SlotAtNewServer(
            f"the new server has a slot {name!r}, and nothing proves that it belongs to this log",
            remedy=f"if pg_upgrade copied the slot, or no other consumer reads it, run SELECT "
            f"pg_drop_replication_slot('{name}'); on the new server, then run the command again; otherwise set "
            "another source.slot.name",
        ) from exc
