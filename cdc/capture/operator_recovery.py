"""Operator recovery: begin a new epoch, adopt a slot, or skip to an LSN, while no reader runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from cdc import metrics
from cdc.capture.commit_outside_stream import SnapshotCommit
from cdc.capture.initial_snapshot import ensure_initial_snapshot
from cdc.capture.resume_checks import check_slot_kind
from cdc.capture.settings import ReaderSettings, reader_settings
from cdc.capture.slot_belongs_to_log import (
    SlotClaim,
    check_adopted,
    check_replaceable,
    check_replaceable_by_command,
    check_written_from,
    slot_missing_error,
)
from cdc.config import Definition
from cdc.errors import CdcError, ConfigError, LogError, SlotInUse, SlotMissing, StateConflict
from cdc.failpoint import hit
from cdc.log.disk_format import CommitInfo, LogIdentity
from cdc.log.epoch_and_slot_records import PendingEpoch, read_pending_epoch, write_pending_epoch, write_slot_record
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.replication import identify_system
from cdc.postgres.slot import SlotStatus, advance_slot, copy_lock, slot_status
from cdc.table import TableSchema, TableState, matches

START_READER: Final = "start the reader, which takes the initial snapshot; no recovery is needed"
RELEASE_TIMEOUT: Final = 3.0
"""Maximum seconds for which a command waits until the server releases the slot of a reader that has ended."""


def begin_epoch(definition: Definition) -> dict[str, Any]:
    """Begin the next epoch of the log: create publication and slot, and copy every table.

    Targets then delete the rows that the source no longer has.

    The request for the epoch is durable before anything changes. From then on only the new epoch can continue the log;
    if the command is killed, the reader completes the epoch. Raises LogError if the log is empty, SlotInUse while a
    reader streams, and SlotNotOwned, SlotNotCreated, SlotBlocked or PreflightFailed.
    """
    settings = reader_settings(definition)
    writer = open_log_writer(definition)
    before = writer.durable
    if before is None:
        raise LogError("slot recovery is not possible: the log is empty", remedy=START_READER)
    idle_slot(definition)
    _record_slot_for_replacement(settings, writer)
    write_pending_epoch(settings.log, PendingEpoch(before.epoch + 1, "requested with cdc slots recover"))
    hit("after_intent")
    ensure_initial_snapshot(settings.source, settings.log, writer, metrics.Metrics())
    log = LogReader(settings.log)
    schemas = log.schemas().values()
    live = [s for s in schemas if s.state is TableState.LIVE]
    later = sorted(s.topic for s in schemas if s.state is TableState.SNAPSHOTTING)
    done = {"epoch": before.epoch + 1, "before": str(before), "position": str(log.durable)}
    return {**done, "tables": len(live), "copied_by_reader": later}


def _record_slot_for_replacement(settings: ReaderSettings, writer: LogWriter) -> None:
    """Write the slot's current positions to the log's slot record, so that the snapshot may replace the slot."""
    source, claim = settings.source, SlotClaim.of(settings.log, writer)
    identity = identify_system(source.dsn)
    with connect(source.dsn, application_name="cdc slots") as conn, copy_lock(conn, source.slot):
        slot = slot_status(conn, source.slot)
        if not source.create_slot:
            check_adopted(slot, source.slot, claim, identity)
        elif slot is not None:
            check_replaceable_by_command(slot, claim, identity)
            write_slot_record(settings.log, claim.record_of(slot, identity))


def declare_next_epoch(settings: ReaderSettings, exc: CdcError) -> None:
    """Request a new epoch after the error `exc`, which shows that the source cannot continue the log.

    No operator confirms this request, so it must be certain that the slot belongs to the log. Otherwise the function
    raises SlotNotOwned or SlotNotCreated, and requests nothing. It raises `exc` if the log is empty.
    """
    source, log = settings.source, LogReader(settings.log)
    if log.durable is None:
        raise exc
    claim, identity = SlotClaim.of(settings.log, log), identify_system(source.dsn)
    with connect(source.dsn, application_name="cdc slots") as conn:
        slot = slot_status(conn, source.slot)
    if not source.create_slot:
        check_adopted(slot, source.slot, claim, identity)
    elif slot is not None:
        check_replaceable(slot, claim, identity)
    write_pending_epoch(settings.log, PendingEpoch(log.durable.epoch + 1, f"{exc.code} {exc.message}"))


def adopt_slot(definition: Definition) -> dict[str, Any]:
    """Assign the slot of the definition, which an operator created, to this log; the slot itself does not change.

    Creates the log if there is none. Raises SlotNotCreated if there is no slot, SlotUnsuitable if the log
    cannot use it, and SlotInUse if another process uses it.
    """
    settings = reader_settings(definition)
    source = settings.source
    if source.create_slot:
        raise ConfigError(
            "source.slot.create is true, so the reader creates its own slot and no slot can be adopted",
            remedy="set source.slot.create to false",
        )
    identity = identify_system(source.dsn)
    with connect(source.dsn, application_name="cdc slots") as conn, copy_lock(conn, source.slot):
        slot = slot_status(conn, source.slot)
        if slot is None:
            raise slot_missing_error(source.slot)
        check_slot_kind(slot, identity.database)
        if slot.active:
            raise SlotInUse(
                f"slot {slot.name!r} is in use by pid {slot.active_pid}",
                remedy="stop the process that uses the slot, then run the command again",
            )
        log = LogIdentity(system_id=identity.system_id, database=identity.database)
        writer = LogWriter.open(settings.log, log, settings.limits)
        claim = SlotClaim.of(settings.log, writer)
        write_slot_record(settings.log, claim.record_of(slot, identity, adopted=True))
    return {"slot": slot.name, "confirmed": str(slot.confirmed_flush), "log": str(writer.durable)}


def skip_to_lsn(definition: Definition, lsn: Lsn, tables: Sequence[str]) -> dict[str, Any]:
    """Advance the log and then the slot to `lsn`; transactions in between are lost, and `tables` need a resync.

    The log advances first, because a slot behind the log is normal and a slot ahead of the log means a gap. After a
    crash the function can be called again: it advances the log and the slot only if they are behind `lsn`.
    """
    writer = open_log_writer(definition)
    last = writer.last_commit
    if last is None:
        raise LogError("slot recovery is not possible: the log is empty", remedy=START_READER)
    check_no_pending_epoch(definition, last)
    slot = idle_slot(definition)
    if slot is None:
        raise SlotMissing(
            f"slot {definition.source.slot.name!r} does not exist, so it cannot be advanced; the log is at {last.last}"
        )
    check_written_from(
        slot, SlotClaim.of(definition.log.root, writer), identify_system(definition.source.current_dsn())
    )
    if lsn > slot.wal_end or (slot.confirmed_flush is not None and lsn <= slot.confirmed_flush):
        raise ConfigError(
            f"--skip-to is out of range: expected an LSN after {slot.confirmed_flush} and up to {slot.wal_end}, "
            f"got {lsn}",
            remedy="run 'cdc slots ls' to see the slot's position, and SELECT pg_current_wal_lsn() to see the "
            "end of the WAL",
        )
    source = definition.source
    schemas = LogReader(definition.log.root).schemas().values()
    chosen = [s for s in schemas if matches(s.topic, tables) and s.state is not TableState.DROPPED]
    if not chosen:
        raise ConfigError(
            f"no table of the log matches {list(tables)!r}", remedy="run 'cdc log inspect' to see the tables"
        )
    with connect(source.dsn.reveal(), application_name="cdc slots") as conn, copy_lock(conn, slot.name):
        position = Position.of(lsn - 1, last.last.epoch)
        if position > last.last:
            _mark_for_resync(writer, chosen, last, position)
        hit("after_skip_marked")
        moved = advance_slot(conn, slot.name, lsn)
    marked = sorted(schema.topic for schema in chosen)
    return {"from": str(slot.confirmed_flush), "slot_at": str(moved), "log_at": str(position), "marked": marked}


def _mark_for_resync(writer: LogWriter, tables: Sequence[TableSchema], last: CommitInfo, position: Position) -> None:
    """Commit an `s` row with state `needs_resync` for each table, at the position up to which changes are lost."""
    reason = f"an operator skipped the changes from {last.last} to {position}"
    commit = SnapshotCommit(writer, position)
    for schema in tables:
        commit.mark(schema.flagged(TableState.NEEDS_RESYNC, reason))
    commit.commit(last.commit_source)


def check_no_pending_epoch(definition: Definition, last: CommitInfo) -> None:
    """Raise StateConflict if a new epoch was requested and has not begun; last: last commit of the log."""
    intent = read_pending_epoch(definition.log.root)
    if intent is not None and intent.epoch > last.last.epoch:
        raise StateConflict(
            f"the log cannot be continued yet: epoch {intent.epoch} was requested and has not begun",
            remedy="run 'cdc slots recover -c FILE --new-epoch', or start the reader, which also begins the epoch",
        )


def open_log_writer(definition: Definition) -> LogWriter:
    """Open the existing log of a definition for writing."""
    LogReader(definition.log.root)  # raises LogError if there is no log: this command never creates one
    return LogWriter(definition.log.root, reader_settings(definition).limits)


@retry(
    retry=retry_if_exception_type(SlotInUse),
    stop=stop_after_delay(RELEASE_TIMEOUT),
    wait=wait_fixed(0.1),
    reraise=True,
)
def idle_slot(definition: Definition) -> SlotStatus | None:
    """Return the status of the pipeline's slot; None if the slot does not exist.

    Raises SlotInUse if a process still uses the slot after RELEASE_TIMEOUT seconds.
    """
    source = definition.source
    with connect(source.dsn.reveal(), application_name="cdc slots") as conn:
        slot = slot_status(conn, source.slot.name)
    if slot is not None and slot.active:
        raise SlotInUse(
            f"slot {slot.name!r} is in use by pid {slot.active_pid}",
            remedy="stop the reader that uses the slot, then run the command again",
        )
    return slot
