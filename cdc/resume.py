"""Where a reader goes on, or why it must not: the log, the slot and the server held against each other."""

from __future__ import annotations

from cdc.errors import SlotInvalidated, SlotMissing, SourceGap, SourceReplaced, SourceWentBack
from cdc.log.layout import CommitInfo, LogIdentity
from cdc.lsn import Lsn
from cdc.postgres.replication import SystemIdentity
from cdc.postgres.slot import SlotStatus


def check_source(log: LogIdentity, last: CommitInfo, source: SystemIdentity, slot: SlotStatus | None) -> None:
    """Raise the error that says why the log cannot be continued from this source; silence is consent.

    A slot behind the log is habit: after a crash of the server it goes back, and what comes twice is dropped by
    position. A slot ahead of it is always a gap (PostgreSQL accepts any confirmation without a word).
    """
    durable = last.last.lsn
    if source.system_id != log.system_id:
        raise SourceReplaced(f"another cluster: the log is of system {log.system_id}, the source is {source.system_id}")
    if source.wal_end < durable:
        raise SourceWentBack(f"the source's WAL ends at {source.wal_end}, the log is at {durable}")
    if source.timeline != last.timeline:
        raise SourceReplaced(f"timeline changed from {last.timeline} to {source.timeline} without proof of continuity")
    if slot is None:
        raise SlotMissing(f"the slot is gone; the log is at {durable}")
    if slot.wal_status == "lost" or slot.invalidation_reason:
        raise SlotInvalidated(f"slot {slot.name!r} is invalidated: {slot.invalidation_reason or 'wal removed'}")
    if slot.confirmed_flush is not None and slot.confirmed_flush > durable + 1:
        raise SourceGap(f"slot {slot.name!r} stands at {slot.confirmed_flush}, the log at {durable}")


def confirmable(durable: int) -> Lsn:
    """What to tell Postgres as flushed: everything below durable + 1 is ours.

    A commit record at LSN x is skipped by the server when x is below the confirmed position, so plus one keeps
    the last transaction from being sent again.
    """
    return Lsn(durable + 1)
