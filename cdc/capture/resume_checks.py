"""Where a reader goes on, or why it must not: the log, the slot and the server held against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cdc.errors import (
    PublicationByPartition,
    PublicationMissing,
    PublicationNarrowed,
    PublicationReplaced,
    SlotInvalidated,
    SlotMissing,
    SlotUnsuitable,
    SourceBehindLog,
    SourceGap,
    SourceReplaced,
    TimelineChanged,
)
from cdc.log.layout import CommitInfo, Lineage, LogIdentity
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.publication import addition_sql, via_root_sql
from cdc.postgres.slot import PLUGIN, SlotStatus
from cdc.postgres.source_identity import PublicationStatus, SourceState
from cdc.postgres.tables import TableName
from cdc.remedy import complete_remedy
from cdc.table import TableSchema, TableState, split_topic

RECOVER: Final = "run 'cdc slots recover -c FILE --new-epoch'"
"""The way on for everything that the stream cannot bring any more."""

DISCONTINUED: Final = (
    SlotMissing,
    SlotInvalidated,
    SourceGap,
    SourceBehindLog,
    TimelineChanged,
    PublicationMissing,
    PublicationReplaced,
)
"""Errors that RECOVER mends; another cluster is none of them, for that may be a slip in the definition."""

INVALIDATED: Final[Mapping[str, str]] = {
    "wal_removed": "raise max_slot_wal_keep_size (ALTER SYSTEM SET max_slot_wal_keep_size = '…'; "
    "SELECT pg_reload_conf();), then " + RECOVER,
    "rows_removed": "set hot_standby_feedback = on at the standby and give it a physical slot, then " + RECOVER,
    "wal_level_insufficient": "set wal_level = logical at the primary and restart it, then " + RECOVER,
    "idle_timeout": "raise idle_replication_slot_timeout (ALTER SYSTEM SET idle_replication_slot_timeout = 0; "
    "SELECT pg_reload_conf();), then " + RECOVER,
}
"""Remedy by `pg_replication_slots.invalidation_reason`; before version 17 the only reason is the first."""


def check_source(log: LogIdentity, last: CommitInfo, source: SourceState, durable: Position | None = None) -> None:
    """Raise the error that says why the log cannot be continued from this source; silence is consent.

    A slot behind the log is habit: after a crash of the server it goes back, and what comes twice is dropped by
    position. A slot ahead of it is always a gap (PostgreSQL accepts any confirmation without a word).

    `last` is what the log held before the source was looked at, `durable` where it stood after that: another reader
    may have written and confirmed in between. Who holds the slot himself needs no second look.
    """
    _check_cluster(log, last, source)
    _check_slot((durable or last.last).lsn, source.slot, source.identity.database)
    check_publication(last, source.publication)


def check_publication(last: CommitInfo, publication: PublicationStatus | None) -> None:
    """Raise the error that says why the publication is not the one that the log was written from."""
    if publication is None:
        raise PublicationMissing("the publication is gone")
    if last.publication not in {0, publication.oid}:
        raise PublicationReplaced(f"publication {publication.name!r} was dropped and made anew")
    if publication.missing:
        raise _narrowed(publication)
    if publication.by_leaf:
        listed = ", ".join(publication.by_leaf)
        raise PublicationByPartition(
            f"publication {publication.name!r} sends changes of {listed} under the names of the partitions",
            remedy=f"run {via_root_sql(publication.name)} then restart the reader",
        )


def _narrowed(publication: PublicationStatus) -> PublicationNarrowed:
    listed = ", ".join(publication.missing)
    statement = addition_sql(publication.name, [TableName(*split_topic(topic)) for topic in publication.missing])
    copies = ", ".join(complete_remedy("'cdc tables resync TABLE'", topic=topic) for topic in publication.missing)
    return PublicationNarrowed(
        f"publication {publication.name!r} no longer has {listed}",
        remedy=f"run {statement} start the reader, then run {copies}",
    )


def captured_oids(known: Mapping[int, TableSchema]) -> list[int]:
    """OIDs of the tables that the log follows; one that it has marked as dropped is none of them."""
    return [schema.oid for schema in known.values() if schema.state is not TableState.DROPPED]


def lineage_of(source: SourceState) -> Lineage:
    """What the commits of a session with this source say of it."""
    oid = 0 if source.publication is None else source.publication.oid
    return Lineage(source.identity.timeline, source.identity.system_id, oid)


def lsn_to_confirm(durable: int) -> Lsn:
    """What to tell Postgres as flushed: everything below durable + 1 is ours.

    A commit record at LSN x is skipped by the server when x is below the confirmed position, so plus one keeps
    the last transaction from being sent again.
    """
    return Lsn(durable + 1)


def _check_cluster(log: LogIdentity, last: CommitInfo, source: SourceState) -> None:
    known, found = last.system_id or log.system_id, source.identity
    if found.system_id != known:
        raise SourceReplaced(f"another cluster: the log is of system {known}, the source is {found.system_id}")
    if found.timeline != last.timeline:
        raise TimelineChanged(f"timeline changed from {last.timeline} to {found.timeline} without proof of continuity")
    if found.wal_end < last.last.lsn:
        raise SourceBehindLog(f"the source's WAL ends at {found.wal_end}, the log is at {last.last.lsn}")


def check_slot_kind(slot: SlotStatus, database: str) -> None:
    """Raise SlotUnsuitable unless the slot is a logical one of pgoutput in this database."""
    drop = f"SELECT pg_drop_replication_slot('{slot.name}'); or choose another source.slot.name; then {RECOVER}"
    if slot.plugin is None:
        raise SlotUnsuitable(f"slot {slot.name!r} is a physical one: expected a logical one of {PLUGIN}", remedy=drop)
    if slot.plugin != PLUGIN:
        raise SlotUnsuitable(f"slot {slot.name!r} is of plugin {slot.plugin!r}: expected {PLUGIN!r}", remedy=drop)
    if slot.database != database:
        raise SlotUnsuitable(
            f"slot {slot.name!r} is of database {slot.database!r}: expected {database!r}",
            remedy="name the slot's database in source.dsn, or choose another source.slot.name",
        )


def _check_slot(durable: Lsn, slot: SlotStatus | None, database: str) -> None:
    if slot is None:
        raise SlotMissing(f"the slot is gone; the log is at {durable}")
    check_slot_kind(slot, database)
    if slot.wal_status == "lost" or slot.invalidation_reason:
        reason = slot.invalidation_reason or "wal_removed"
        raise SlotInvalidated(f"slot {slot.name!r} is invalidated: {reason}", remedy=INVALIDATED.get(reason))
    if slot.confirmed_flush is not None and slot.confirmed_flush > durable + 1:
        raise SourceGap(f"slot {slot.name!r} stands at {slot.confirmed_flush}, the log at {durable}")
