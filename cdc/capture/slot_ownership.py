"""Slot claim: what a log can prove of the replication slot of its definition's name before a copy replaces it.

A slot has no owner on the server, only a name, and names are copied with definitions. So a copy drops a slot only if
one of these holds; anything else is an error that leaves the slot as it is:

- The log's slot record names this slot at exactly its positions: an unfinished copy of this log made it and no reader
  has confirmed anything since, or an operator's command gave it up as it is now.
- The log's last commit is from this server and timeline, its slot record has the slot's name, and the slot is not
  ahead of the log. A slot that is made later begins after the log's position, so the log was written from this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from cdc.capture.resume_checks import check_slot_kind, lsn_to_confirm
from cdc.errors import SlotInUse, SlotNotCreated, SlotNotOwned, UnexpectedSlot
from cdc.log.layout import CommitInfo
from cdc.log.object_path import Root
from cdc.log.reader import LogReader
from cdc.log.slot_record import SlotRecord, read_slot_record, write_slot_record
from cdc.log.writer import LogWriter
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.replication import SystemIdentity
from cdc.postgres.slot import PLUGIN, SlotStatus

ALIGNMENT: Final = 8
"""Records of the WAL begin at multiples of it. A reader of ours confirms one byte more, see `lsn_to_confirm`."""


@dataclass(frozen=True, slots=True)
class SlotClaim:
    """What a log says of the slot that its definition names."""

    root: Root
    log_id: str | None
    """None where there is no log."""
    last: CommitInfo | None
    """None while the log is empty."""
    system_id: str
    """Of the server that the log was written from; "" where there is no log."""
    record: SlotRecord | None

    @classmethod
    def of(cls, root: Root, log: LogReader | LogWriter | None) -> Self:
        """The claim of a log; raises LogCorrupt if its slot record cannot be read."""
        record = read_slot_record(root)
        if log is None:
            return cls(root, None, None, "", record)
        last = log.last_commit
        return cls(root, log.log_id, last, (last and last.system_id) or log.identity.system_id, record)

    def record_of(self, slot: SlotStatus, source: SystemIdentity, *, adopted: bool = False) -> SlotRecord:
        """The record that names this slot exactly as it is."""
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
        """Whether the slot record names this slot of this server exactly as it is."""
        record = self.record
        if record is None or slot.name != record.slot or record.log_id != self.log_id:
            return False
        if (record.system_id, record.timeline, record.database) != (source.system_id, source.timeline, slot.database):
            return False
        # an invalidated slot has lost its restart position
        return slot.confirmed_flush == record.confirmed_flush and slot.restart_lsn in {record.restart_lsn, None}

    def is_written_from(self, slot: SlotStatus, source: SystemIdentity) -> bool:
        """Whether the log's last commit can only have come through this slot."""
        last = self.last
        if last is None or (self.system_id, last.timeline) != (source.system_id, source.timeline):
            return False
        if self.record is not None and self.record.slot != slot.name:
            return False
        if source.wal_end < last.last.lsn or slot.confirmed_flush is None:
            return False
        return slot.confirmed_flush <= lsn_to_confirm(last.last.lsn)


def check_replaceable(slot: SlotStatus, claim: SlotClaim, source: SystemIdentity, seen: Position | None = None) -> None:
    """Raise the error that says why a copy must not drop the slot.

    seen: the last position of this pipeline's log that the catalog knows, as evidence against an unfinished copy.
    Raises SlotUnsuitable, UnexpectedSlot, SlotNotOwned, and SlotInUse for one of ours that somebody streams from.
    """
    check_slot_kind(slot, source.database)
    recorded = claim.records(slot, source) and not (claim.record is not None and claim.record.adopted)
    committed = claim.last is None and seen is not None and lsn_to_confirm(seen.lsn) >= (slot.confirmed_flush or Lsn(0))
    if not (recorded and not committed) and not claim.is_written_from(slot, source):
        raise _unproven(slot, claim, seen)
    if slot.active:
        raise SlotInUse(f"slot {slot.name!r} is in use by pid {slot.active_pid}", remedy="stop the other reader first")


def check_replaceable_by_command(slot: SlotStatus, claim: SlotClaim, source: SystemIdentity) -> None:
    """Raise the error that says why an operator's command must not drop the slot for a new epoch of the log.

    The command stands for a proof, but not against one: a slot of another server, or one that another log of ours was
    written from, is not this log's.
    """
    check_slot_kind(slot, source.database)
    if slot.active:
        raise SlotInUse(f"slot {slot.name!r} is in use by pid {slot.active_pid}", remedy="stop the reader first")
    if claim.records(slot, source) or claim.is_written_from(slot, source):
        return
    if claim.system_id != source.system_id:
        raise SlotNotOwned(
            f"slot {slot.name!r} is of system {source.system_id}, the log of system {claim.system_id}",
            remedy=_drop_by_hand(slot),
        )
    if slot.confirmed_flush is not None and slot.confirmed_flush % ALIGNMENT and not _is_behind(slot, claim.last):
        raise SlotNotOwned(
            f"slot {slot.name!r} is at {slot.confirmed_flush}, which a reader of another log has confirmed",
            remedy=_drop_by_hand(slot),
        )


def check_slot_name(claim: SlotClaim, slot: SlotStatus | None) -> None:
    """Raise SlotNotOwned if the log was written from a slot of another name: this one may be another pipeline's."""
    record = claim.record
    if slot is not None and record is not None and record.log_id == claim.log_id and record.slot != slot.name:
        raise SlotNotOwned(
            f"the log was written from slot {record.slot!r}, and the definition names slot {slot.name!r}",
            remedy=f"set source.slot.name to {record.slot!r} again; for another slot choose a name that is free, then "
            "'cdc slots recover -c FILE --new-epoch'",
        )


def record_slot(claim: SlotClaim, slot: SlotStatus | None, source: SystemIdentity) -> None:
    """Record the slot of a log that was begun before there were slot records; for the reader that streams from it."""
    if slot is not None and claim.record is None:
        write_slot_record(claim.root, claim.record_of(slot, source))


def check_adopted(slot: SlotStatus | None, name: str, claim: SlotClaim, source: SystemIdentity) -> SlotStatus:
    """The slot that a copy may begin at where `source.slot.create` is false; raises SlotNotCreated, SlotUnsuitable."""
    if slot is None:
        raise slot_missing_error(name)
    check_slot_kind(slot, source.database)
    if claim.record is None or not claim.record.adopted or not claim.records(slot, source):
        raise SlotNotCreated(f"slot {name!r} exists, and nothing says that it was made for this log")
    return slot


def slot_missing_error(name: str) -> SlotNotCreated:
    """The error for a slot that is not there and that the reader may not create."""
    return SlotNotCreated(
        f"slot {name!r} does not exist, and source.slot.create is false",
        remedy=f"SELECT pg_create_logical_replication_slot('{name}', '{PLUGIN}'); then 'cdc slots adopt -c FILE'",
    )


def check_written_from(slot: SlotStatus, claim: SlotClaim, source: SystemIdentity) -> None:
    """Raise SlotUnsuitable or SlotNotOwned unless the log was written from the slot, so that it may be moved."""
    check_slot_kind(slot, source.database)
    if not claim.is_written_from(slot, source):
        raise _unproven(slot, claim, None)


def _unproven(slot: SlotStatus, claim: SlotClaim, seen: Position | None) -> UnexpectedSlot | SlotNotOwned:
    at = f"slot {slot.name!r} is at {slot.confirmed_flush}"
    if claim.last is not None:
        return SlotNotOwned(f"{at}, the log at {claim.last.last}: nothing proves that the log was written from it")
    known = "" if seen is None else f"; the catalog last saw this pipeline's log at {seen}"
    return UnexpectedSlot(
        f"{at}, and the log at {str(claim.root)!r} is empty: nothing proves that this log made the slot{known}",
        remedy=f"if the log was moved away or is not mounted: mount {claim.root}, or mv OLD {claim.root}, and start "
        "again; "
        "if the definition was copied or the slot is somebody else's: set another source.slot.name, "
        "'cdc slots ls -c FILE' lists those in use; if it is left from a first start that did not finish: "
        "'cdc slots drop -c FILE', and start again",
    )


def _is_behind(slot: SlotStatus, last: CommitInfo | None) -> bool:
    return (
        last is not None and slot.confirmed_flush is not None and slot.confirmed_flush <= lsn_to_confirm(last.last.lsn)
    )


def _drop_by_hand(slot: SlotStatus) -> str:
    return (
        f"if nobody else reads it: SELECT pg_drop_replication_slot('{slot.name}'); and run the command again; "
        "else set another source.slot.name"
    )
