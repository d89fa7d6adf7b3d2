"""State of the source: identity, slot and publication, read for a comparison with the last commit of the log."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import psycopg

from cdc.postgres.connection import ANSWER_TIMEOUT, check_same_server, connect, server_start
from cdc.postgres.replication import SystemIdentity, identify_system
from cdc.postgres.slot import SlotStatus, slot_status
from cdc.postgres.sqlstate import map_errors
from cdc.table import topic

_PUBLICATION: Final = "SELECT oid FROM pg_publication WHERE pubname = %s"
# a partition may be sent under the name of an ancestor; then it is not missing, and rewrite detection reports it
_UNPUBLISHED: Final = """
    WITH sent AS MATERIALIZED (
        SELECT c.oid FROM pg_publication_tables t JOIN pg_namespace n ON n.nspname = t.schemaname
        JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename WHERE t.pubname = %(name)s)
    SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = ANY(%(tables)s) AND CASE c.relkind
        WHEN 'p' THEN NOT EXISTS (SELECT FROM pg_publication WHERE pubname = %(name)s AND NOT pubviaroot)
            AND NOT EXISTS (SELECT FROM sent WHERE sent.oid = c.oid)
        WHEN 'r' THEN NOT EXISTS (SELECT FROM sent WHERE sent.oid = c.oid)
        ELSE false END
    AND NOT EXISTS (SELECT FROM pg_partition_ancestors(c.oid) a JOIN sent ON sent.oid = a.relid)
    ORDER BY 1, 2
"""
_BY_LEAF: Final = """
    SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = ANY(%(tables)s) AND c.relkind = 'p'
    AND EXISTS (SELECT FROM pg_publication WHERE pubname = %(name)s AND NOT pubviaroot) ORDER BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class PublicationStatus:
    """One publication, compared with the tables of the log."""

    name: str
    oid: int
    """OID of the publication; it differs after the publication was dropped and created again."""
    missing: tuple[str, ...]
    """`schema.table` of captured tables that still exist but are not in the publication."""
    by_leaf: tuple[str, ...] = ()
    """`schema.table` of captured partitioned tables whose changes are sent under partitions' names."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """State of the source that is compared with a log before capture continues the log."""

    identity: SystemIdentity
    slot: SlotStatus | None
    publication: PublicationStatus | None

    @property
    def awaits_promotion(self) -> bool:
        """True if the source is a standby whose slot cannot be read before its promotion, or that has no slot."""
        return self.identity.in_recovery and (self.slot is None or self.slot.synced is True)


def read_source_state(dsn: str, slot: str, publication: str, tables: Collection[int]) -> SourceState:
    """Read the state of the source; `tables` are the OIDs of the captured tables."""
    identity = identify_system(dsn)
    with connect(dsn, application_name="cdc identify", timeout=ANSWER_TIMEOUT) as conn:
        check_same_server(server_start(conn), identity.started)
        found = slot_status(conn, slot)
        return SourceState(identity, found, publication_status(conn, publication, tables))


def publication_status(conn: psycopg.Connection, name: str, tables: Collection[int]) -> PublicationStatus | None:
    """Return the status of the publication with that name; None if it does not exist."""
    with map_errors():
        # read the publication last: if it is dropped in between, report that and not missing tables
        parameters = {"tables": sorted(tables), "name": name}
        missing = [topic(*row) for row in conn.execute(_UNPUBLISHED, parameters)]
        by_leaf = [topic(*row) for row in conn.execute(_BY_LEAF, parameters)]
        found = conn.execute(_PUBLICATION, [name]).fetchone()
    if found is None:
        return None
    return PublicationStatus(name, int(found[0]), tuple(missing), tuple(by_leaf))
