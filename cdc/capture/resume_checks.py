"""Resume checks: compare the log with slot, publication and server, and raise an error if changes may be lost.

A promotion is proved from four facts. The system identifier is that of the log. The source's timeline history contains
the log's timeline, which began where the last commit of the log says. The source left that timeline at a switch point
above the log's position, so it has every transaction of the log. The slot is not ahead of the log. Then the log
continues in its epoch, however the slot came to the new primary.

If the switch point is not above the log's position, the log has transactions that the source never had. Then the slot
must be at the switch point or before it, because the log is right only up to there. `failover.py` continues such a log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cdc.errors import (
    FormerPrimary,
    PublicationByPartition,
    PublicationMissing,
    PublicationNarrowed,
    PublicationReplaced,
    SlotInvalidated,
    SlotMissing,
    SlotUnsuitable,
    SourceBehindLog,
    SourceCloned,
    SourceForked,
    SourceGap,
    SourceInRecovery,
    SourceReplaced,
    SourceRestored,
    TimelineChanged,
    TransactionsLost,
    complete_remedy,
)
from cdc.log.disk_format import CommitInfo, CommitSource, LogIdentity
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.publication import addition_sql, via_root_sql
from cdc.postgres.replication import SystemIdentity
from cdc.postgres.slot import PLUGIN, SlotStatus
from cdc.postgres.source_state import PublicationStatus, SourceState
from cdc.postgres.tables import TableName
from cdc.postgres.timeline_history import TimelineSwitch
from cdc.table import TableSchema, TableState, split_topic

RECOVER: Final = "run 'cdc slots recover -c FILE --new-epoch'"
"""Remedy of errors after which the stream cannot deliver all changes from the log's position on."""

DISCONTINUED: Final = (
    SlotMissing,
    SlotInvalidated,
    SourceGap,
    SourceBehindLog,
    PublicationMissing,
    PublicationReplaced,
)
"""Errors that a new epoch fixes.

SourceReplaced and the errors of timelines are not among them: the definition may name the wrong server.
"""

INVALIDATED: Final[Mapping[str, str]] = {
    "wal_removed": "raise max_slot_wal_keep_size (ALTER SYSTEM SET max_slot_wal_keep_size = '…'; "
    "SELECT pg_reload_conf();), then " + RECOVER,
    "rows_removed": "set hot_standby_feedback = on at the standby and give it a physical slot, then " + RECOVER,
    "wal_level_insufficient": "set wal_level = logical at the primary and restart it, then " + RECOVER,
    "idle_timeout": "disable idle_replication_slot_timeout (ALTER SYSTEM SET idle_replication_slot_timeout = 0; "
    "SELECT pg_reload_conf();), then " + RECOVER,
}
"""Remedy for each `pg_replication_slots.invalidation_reason`; before Postgres 17 the reader assumes `wal_removed`."""


def check_source(log: LogIdentity, last: CommitInfo, source: SourceState, durable: Position | None = None) -> None:
    """Raise an error if the log cannot be continued from this source.

    A slot behind the log is normal: a server crash moves the slot back, and the reader drops changes up to the log's
    position. A slot ahead of the log always means a gap.

    last: last commit of the log, read before the source was queried. durable: durable position of the log, read after
    the source was queried; another reader may have committed and confirmed in between. A caller that owns the slot
    omits `durable`, because no other reader can commit.
    """
    lost_from = find_lost_transactions(log, last, source)
    if lost_from is None:
        if source.identity.wal_end < last.last.lsn:
            raise SourceBehindLog(
                f"the source's WAL ends at {source.identity.wal_end}, before the log's position {last.last.lsn}"
            )
        _check_slot((durable or last.last).lsn, source.slot, source.identity.database)
    else:
        check_promotion(last, source, lost_from)
        raise TransactionsLost(lost_text(last, source, lost_from))
    check_publication(last, source.publication)


def find_lost_transactions(log: LogIdentity, last: CommitInfo, source: SourceState) -> TimelineSwitch | None:
    """Return the switch after which the log has transactions that the source never had; None if the source has all.

    Raises an error unless the source's timeline is the log's timeline or descends from it.
    """
    log_system_id, identity = last.system_id or log.system_id, source.identity
    if identity.system_id != log_system_id:
        raise SourceReplaced(
            f"the source is another cluster: its system identifier is {identity.system_id}, and the log was written "
            f"from the cluster with system identifier {log_system_id}"
        )
    left = _switch_after(last, identity)
    if source.awaits_promotion:
        what = "has no slot for the log" if source.slot is None else f"only synchronizes slot {source.slot.name!r}"
        raise SourceInRecovery(f"the source is a standby in recovery, and {what}")
    return left if left is not None and _is_beyond(last, left) else None


def has_all_transactions(last: CommitInfo, source: SystemIdentity) -> bool:
    """Return True if the source's timeline is that of the log, or descends from it and has all its transactions."""
    try:
        left = _switch_after(last, source)
    except (FormerPrimary, SourceForked, TimelineChanged):
        return False
    return left is None or not _is_beyond(last, left)


def _switch_after(last: CommitInfo, source: SystemIdentity) -> TimelineSwitch | None:
    """Return the switch with which the source left the timeline of the log; None if it is still on this timeline.

    Raises FormerPrimary, SourceForked or TimelineChanged if the source does not descend from the log's timeline.
    """
    if source.timeline < last.timeline:
        raise FormerPrimary(
            f"the source is on timeline {source.timeline}, and the log is on timeline {last.timeline}, which began at "
            f"{last.switch_point}: the source is a primary from before the promotion"
        )
    left = source.history.left(last.timeline)
    if left is None and source.timeline > last.timeline:
        raise TimelineChanged(
            f"the source's timeline changed from {last.timeline} to {source.timeline}, and its timeline history does "
            f"not contain timeline {last.timeline}"
        )
    began = source.history.began(last.timeline)
    if last.switch_point and began and began != last.switch_point:
        raise SourceForked(
            f"timeline {last.timeline} of the log began at {last.switch_point}, and that of the source began at "
            f"{began}: two servers were promoted"
        )
    return left


def _is_beyond(last: CommitInfo, left: TimelineSwitch) -> bool:
    """Return True if the log has a record from behind the switch point.

    The position of a transaction is the first byte of its commit record, which is below the switch point if the source
    has the transaction. A message outside transactions has the position of the last byte of its record, and the first
    commit of an epoch the position before its snapshot. So in each case the LSN after the position counts.
    """
    return lsn_to_confirm(last.last.lsn) > left.switch_point


def check_promotion(
    last: CommitInfo, source: SourceState, lost_from: TimelineSwitch, *, accepted: bool = False
) -> None:
    """Raise an error unless the slot sends every change after the switch point, and the source succeeds the log's.

    accepted: True if an operator has confirmed that the source is the new primary; then only the slot is checked.
    """
    # the slot must send the record at the switch point, so it may not be above it
    _check_slot(Lsn(lost_from.switch_point - 1), source.slot, source.identity.database)
    lost = lost_text(last, source, lost_from)
    if lost_from.is_restore and not accepted:
        raise SourceRestored(f"{lost}; the server was restored to a recovery target ({lost_from.reason})")
    if source.slot is not None and source.slot.synced is False and not accepted:
        raise SourceCloned(f"{lost}; slot {source.slot.name!r} was not synchronized, so the server may be a clone")


def lost_text(last: CommitInfo, source: SourceState, lost_from: TimelineSwitch) -> str:
    """Return the sentence that says which part of the log the source never had."""
    return (
        f"the source left timeline {lost_from.timeline} at {lost_from.switch_point} for timeline "
        f"{source.identity.timeline}, and the log is at {last.last}: the source does not have the log's transactions "
        f"from {lost_from.switch_point} on"
    )


def check_publication(last: CommitInfo, publication: PublicationStatus | None) -> None:
    """Raise an error unless the publication is that of the last commit and sends all changes of the captured tables."""
    if publication is None:
        raise PublicationMissing("the publication (source.publication.name) does not exist at the source")
    if last.publication not in {0, publication.oid}:
        raise PublicationReplaced(
            f"publication {publication.name!r} was dropped and created again since the log's last commit"
        )
    if publication.missing:
        raise _narrowed(publication)
    if publication.by_leaf:
        listed = ", ".join(publication.by_leaf)
        raise PublicationByPartition(
            f"publication {publication.name!r} sends changes of {listed} under the names of their partitions",
            remedy=f"run {via_root_sql(publication.name)} then restart the reader",
        )


def _narrowed(publication: PublicationStatus) -> PublicationNarrowed:
    listed = ", ".join(publication.missing)
    statement = addition_sql(publication.name, [TableName(*split_topic(topic)) for topic in publication.missing])
    copies = ", ".join(complete_remedy("'cdc tables resync TABLE'", topic=topic) for topic in publication.missing)
    return PublicationNarrowed(
        f"publication {publication.name!r} no longer contains {listed}, so changes of these tables are not sent",
        remedy=f"run {statement} start the reader, then run {copies}",
    )


def captured_oids(schemas: Mapping[int, TableSchema]) -> list[int]:
    """Return the OIDs of the captured tables, without the tables that the log marks as dropped."""
    return [schema.oid for schema in schemas.values() if schema.state is not TableState.DROPPED]


def lineage_of(source: SourceState) -> CommitSource:
    """Return the source identity and the OID of the publication, which every commit of a session records."""
    oid = 0 if source.publication is None else source.publication.oid
    identity = source.identity
    return CommitSource(identity.timeline, identity.system_id, oid, identity.history.switch_point)


def lsn_to_confirm(durable: int) -> Lsn:
    """Return the LSN to confirm to Postgres as flushed: durable + 1.

    The server skips only commit records below the confirmed LSN. Without the addition it would send the last
    transaction again.
    """
    return Lsn(durable + 1)


def check_slot_kind(slot: SlotStatus, database: str) -> None:
    """Raise SlotUnsuitable unless the slot is a logical slot of pgoutput in this database."""
    drop = f"run SELECT pg_drop_replication_slot('{slot.name}'); or set another source.slot.name; then {RECOVER}"
    if slot.plugin is None:
        raise SlotUnsuitable(
            f"slot {slot.name!r} is a physical slot: expected a logical slot with plugin {PLUGIN}", remedy=drop
        )
    if slot.plugin != PLUGIN:
        raise SlotUnsuitable(f"slot {slot.name!r} has plugin {slot.plugin!r}: expected {PLUGIN!r}", remedy=drop)
    if slot.database != database:
        raise SlotUnsuitable(
            f"slot {slot.name!r} belongs to database {slot.database!r}: expected {database!r}",
            remedy="set the slot's database in source.dsn, or set another source.slot.name",
        )


def _check_slot(durable: Lsn, slot: SlotStatus | None, database: str) -> None:
    if slot is None:
        raise SlotMissing(
            f"the replication slot (source.slot.name) does not exist at the source; the log is at {durable}"
        )
    check_slot_kind(slot, database)
    if slot.wal_status == "lost" or slot.invalidation_reason:
        reason = slot.invalidation_reason or "wal_removed"
        raise SlotInvalidated(
            f"slot {slot.name!r} is invalidated: {reason}; the server sends no more changes from it",
            remedy=INVALIDATED.get(reason),
        )
    if slot.confirmed_flush is not None and slot.confirmed_flush > durable + 1:
        raise SourceGap(
            f"slot {slot.name!r} is at {slot.confirmed_flush}, ahead of the log's position {durable}: the changes in "
            "between are not in the log"
        )
