"""Slot checks: whether a replication slot belongs to a log, before a reader uses the slot or a snapshot replaces it.

On the server a slot has only a name and no owner, and a copy of a definition names the same slot as the original.
Therefore a snapshot drops a slot only in one of these cases; any other case is an error, and the slot stays:

- The log's slot record (`_slot.json`) contains this slot with exactly its current positions. Then an unfinished
  snapshot of this log created the slot and no reader has confirmed a position since; or an operator's command recorded
  the slot.
- The log's last commit is from this cluster, and this server has all transactions of the log, also after a promotion.
  The slot record contains the slot's name, and the slot is not ahead of the log. A slot created after that commit would
  be ahead of the log, so the log was written from this slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from cdc.bucket_files import Root
from cdc.capture.resume_checks import check_slot_kind, check_source, has_all_transactions, lsn_to_confirm
from cdc.errors import LogFenced, SlotInUse, SlotNotCreated, SlotNotOwned, SourceError, UnexpectedSlot
from cdc.log.disk_format import CommitInfo
from cdc.log.epoch_and_slot_records import SlotRecord, read_slot_record, write_slot_record
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.replication import SystemIdentity
from cdc.postgres.slot import PLUGIN, SlotStatus
from cdc.postgres.source_state import SourceState

ALIGNMENT: Final = 8
"""Alignment of WAL records in bytes.

A cdc reader confirms commit LSN + 1, so an unaligned confirmed LSN shows that a cdc reader has used the slot.
"""


@dataclass(frozen=True, slots=True)
class SlotClaim:
    """Evidence that a log owns the slot of its definition."""

    root: Root
    log_id: str | None
    """Identity of the log; None if there is no log."""
    last: CommitInfo | None
    """Last commit of the log; None while the log is empty."""
    system_id: str
    """System identifier of the server that the log was written from; "" if there is no log."""
    record: SlotRecord | None
    """Slot record of the log; None if there is none."""

    @classmethod
    def of(cls, root: Root, log: LogReader | LogWriter | None) -> Self:
        """Return the claim of a log; raises LogCorrupt if the log's slot record cannot be read."""
        record = read_slot_record(root)
        if log is None:
            return cls(root, None, None, "", record)
        last = log.last_commit
        return cls(root, log.log_id, last, (last and last.system_id) or log.identity.system_id, record)

    def record_of(self, slot: SlotStatus, source: SystemIdentity, *, adopted: bool = False) -> SlotRecord:
        """Return a slot record that assigns the slot to this log; it contains the slot's current positions."""
        return SlotRecord(
            log_id=self.log_id or "",
            system_id=source.system_id,
            timeline=source.timeline,
            database=source.database,
            slot=slot.name,
            confirmed_flush=slot.confirmed_flush or Lsn(0),
            restart_lsn=slot.restart_lsn,
            adopted=adopted,
        )

    def records(self, slot: SlotStatus, source: SystemIdentity) -> bool:
        """Return True if the log's slot record names this slot of this server with the slot's current positions."""
        record = self.record
        if record is None or slot.name != record.slot or record.log_id != self.log_id:
            return False
        if (record.system_id, record.timeline, record.database) != (source.system_id, source.timeline, slot.database):
            return False
        # an invalidated slot has lost its restart position
        return slot.confirmed_flush == record.confirmed_flush and slot.restart_lsn in {record.restart_lsn, None}

    def is_written_from(self, slot: SlotStatus, source: SystemIdentity) -> bool:
        """Return True if it is certain that the log was written from this slot."""
        last = self.last
        if last is None or self.system_id != source.system_id or not has_all_transactions(last, source):
            return False
        if self.record is not None and self.record.slot != slot.name:
            return False
        if source.wal_end < last.last.lsn or slot.confirmed_flush is None:
            return False
        return slot.confirmed_flush <= lsn_to_confirm(last.last.lsn)


def check_replaceable(slot: SlotStatus, claim: SlotClaim, source: SystemIdentity, seen: Position | None = None) -> None:
    """Raise an error if a snapshot must not replace the slot.

    Raises SlotUnsuitable, UnexpectedSlot or SlotNotOwned; raises SlotInUse for an active slot that belongs to the log.

    seen: last position of this pipeline's log that the catalog has recorded. If the log is empty and `seen` has reached
    the slot's position, the log once had commits that are now missing; then the slot record proves nothing.
    """
    check_slot_kind(slot, source.database)
    recorded = claim.records(slot, source) and not (claim.record is not None and claim.record.adopted)
    committed = claim.last is None and seen is not None and lsn_to_confirm(seen.lsn) >= (slot.confirmed_flush or Lsn(0))
    if not (recorded and not committed) and not claim.is_written_from(slot, source):
        raise _unproven(slot, claim, seen)
    if slot.active:
        raise SlotInUse(
            f"slot {slot.name!r} is in use by pid {slot.active_pid}",
            remedy="stop the process that uses the slot, or wait until it ends",
        )


def check_replaceable_by_command(slot: SlotStatus, claim: SlotClaim, source: SystemIdentity) -> None:
    """Raise an error if an operator's command must not replace the slot for a new epoch.

    The command may replace a slot without proof that the slot belongs to the log. It must not replace a slot on another
    server, or a slot whose position the reader of another log has confirmed.
    """
    check_slot_kind(slot, source.database)
    if slot.active:
        raise SlotInUse(
            f"slot {slot.name!r} is in use by pid {slot.active_pid}",
            remedy="stop the reader that uses the slot, then run the command again",
        )
    if claim.records(slot, source) or claim.is_written_from(slot, source):
        return
    if claim.system_id != source.system_id:
        raise SlotNotOwned(
            f"slot {slot.name!r} is on cluster {source.system_id}, but the log was written from cluster "
            f"{claim.system_id}",
            remedy=_drop_by_hand(slot),
        )
    if slot.confirmed_flush is not None and slot.confirmed_flush % ALIGNMENT and not _is_behind(slot, claim.last):
        raise SlotNotOwned(
            f"slot {slot.name!r} is at {slot.confirmed_flush}: a reader of another log has confirmed this position",
            remedy=_drop_by_hand(slot),
        )


def check_slot_name(claim: SlotClaim, slot: SlotStatus | None) -> None:
    """Raise SlotNotOwned if the log was written from a slot of another name; `slot` may then belong to another log."""
    record = claim.record
    if slot is not None and record is not None and record.log_id == claim.log_id and record.slot != slot.name:
        raise SlotNotOwned(
            f"the log was written from slot {record.slot!r}, but the definition names slot {slot.name!r}",
            remedy=f"set source.slot.name to {record.slot!r} again; to use another slot, set an unused name and run "
            "'cdc slots recover -c FILE --new-epoch'",
        )


def check_not_overtaken(root: Root, last: CommitInfo, cause: SourceError) -> None:
    """Raise LogFenced if the last commit of the log is no longer `last`, with which a check of the source failed.

    cause: the error of the check.
    """
    durable = LogReader(root).durable
    if durable != last.last:
        raise LogFenced(
            f"another reader committed to the log up to {durable!s} after this process had read it at {last.last!s}"
        ) from cause


def check_resume(root: Root, log: LogReader, last: CommitInfo, state: SourceState) -> None:
    """Raise an error unless this source and its slot can continue the log; the caller streams from the slot.

    If the log has no slot record yet, the function writes the record of this slot. Raises LogFenced if another reader
    took over after this process had read the log: a process that was frozen in between would take the slot of the other
    reader for a slot that is ahead of the log.

    last: last commit of the log, read before the source was queried.
    """
    claim = SlotClaim.of(root, log)
    try:
        check_slot_name(claim, state.slot)
        check_source(log.identity, last, state)
    except SourceError as exc:
        check_not_overtaken(root, last, exc)
        raise
    if state.slot is not None and claim.record is None:
        write_slot_record(root, claim.record_of(state.slot, state.identity))


def check_adopted(slot: SlotStatus | None, name: str, claim: SlotClaim, source: SystemIdentity) -> SlotStatus:
    """Return the adopted slot at which a log or an epoch begins if `source.slot.create` is false.

    Raises SlotNotCreated or SlotUnsuitable if the slot cannot be used.
    """
    if slot is None:
        raise slot_missing_error(name)
    check_slot_kind(slot, source.database)
    if claim.record is None or not claim.record.adopted or not claim.records(slot, source):
        raise SlotNotCreated(f"slot {name!r} exists, but was not adopted for this log, and source.slot.create is false")
    return slot


def slot_missing_error(name: str) -> SlotNotCreated:
    """Return the error for a slot that does not exist and that the reader may not create."""
    return SlotNotCreated(
        f"slot {name!r} does not exist, and source.slot.create is false",
        remedy=f"create the slot: SELECT pg_create_logical_replication_slot('{name}', '{PLUGIN}'); "
        "then run 'cdc slots adopt -c FILE'",
    )


def check_written_from(slot: SlotStatus, claim: SlotClaim, source: SystemIdentity) -> None:
    """Raise SlotUnsuitable or SlotNotOwned unless the log was written from the slot."""
    check_slot_kind(slot, source.database)
    if not claim.is_written_from(slot, source):
        raise _unproven(slot, claim, None)


def _unproven(slot: SlotStatus, claim: SlotClaim, seen: Position | None) -> UnexpectedSlot | SlotNotOwned:
    at = f"slot {slot.name!r} is at {slot.confirmed_flush}"
    if claim.last is not None:
        return SlotNotOwned(
            f"{at}, and the log is at {claim.last.last}: nothing proves that the log was written from the slot"
        )
    last_place = "" if seen is None else f"; the catalog last recorded this pipeline's log at {seen}"
    return UnexpectedSlot(
        f"{at}, and the log at {str(claim.root)!r} is empty: nothing proves that the slot was created for this "
        f"log{last_place}",
        remedy=f"if the log was moved or is not mounted, mount {claim.root} or run mv OLD {claim.root}, then start "
        "again; if the slot belongs to another pipeline or consumer, set another source.slot.name ('cdc slots ls -c "
        "FILE' lists the slots in use); if the slot remains from an interrupted first start, run 'cdc slots drop -c "
        "FILE', then start again",
    )


def _is_behind(slot: SlotStatus, last: CommitInfo | None) -> bool:
    return (
        last is not None and slot.confirmed_flush is not None and slot.confirmed_flush <= lsn_to_confirm(last.last.lsn)
    )


def _drop_by_hand(slot: SlotStatus) -> str:
    return (
        f"if no other consumer reads the slot, run SELECT pg_drop_replication_slot('{slot.name}'); and then this "
        "command again; otherwise set another source.slot.name"
    )
