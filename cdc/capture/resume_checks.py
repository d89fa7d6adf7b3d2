"""Resume checks: compare the log with slot, publication and server, and raise an error if changes may be lost."""

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
    complete_remedy,
)
from cdc.log.disk_format import CommitInfo, CommitSource, LogIdentity
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.publication import addition_sql, via_root_sql
from cdc.postgres.slot import PLUGIN, SlotStatus
from cdc.postgres.source_state import PublicationStatus, SourceState
from cdc.postgres.tables import TableName
from cdc.table import TableSchema, TableState, split_topic

RECOVER: Final = "run 'cdc slots recover -c FILE --new-epoch'"
"""Remedy of errors after which the stream cannot deliver all changes from the log's position on."""

DISCONTINUED: Final = (
    SlotMissing,
    SlotInvalidated,
    SourceGap,
    SourceBehindLog,
    TimelineChanged,
    PublicationMissing,
    PublicationReplaced,
)
"""Errors that a new epoch fixes. SourceReplaced is not among them: the definition may name the wrong server."""

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
    _check_cluster(log, last, source)
    _check_slot((durable or last.last).lsn, source.slot, source.identity.database)
    check_publication(last, source.publication)


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


def captured_oids(known: Mapping[int, TableSchema]) -> list[int]:
    """Return the OIDs of the captured tables, without the tables that the log marks as dropped."""
    return [schema.oid for schema in known.values() if schema.state is not TableState.DROPPED]


def lineage_of(source: SourceState) -> CommitSource:
    """Return the source identity and the OID of the publication, which every commit of a session records."""
    oid = 0 if source.publication is None else source.publication.oid
    return CommitSource(source.identity.timeline, source.identity.system_id, oid)


def lsn_to_confirm(durable: int) -> Lsn:
    """Return the LSN to confirm to Postgres as flushed: durable + 1.

    The server skips only commit records below the confirmed LSN. Without the addition it would send the last
    transaction again.
    """
    return Lsn(durable + 1)


def _check_cluster(log: LogIdentity, last: CommitInfo, source: SourceState) -> None:
    known, found = last.system_id or log.system_id, source.identity
    if found.system_id != known:
        raise SourceReplaced(
            f"the source is another cluster: its system identifier is {found.system_id}, and the log was written "
            f"from the cluster with system identifier {known}"
        )
    if found.timeline != last.timeline:
        raise TimelineChanged(
            f"the source's timeline changed from {last.timeline} to {found.timeline}, so the promoted server "
            "may not have the last transactions of the log"
        )
    if found.wal_end < last.last.lsn:
        raise SourceBehindLog(f"the source's WAL ends at {found.wal_end}, before the log's position {last.last.lsn}")


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
