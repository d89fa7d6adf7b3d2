"""Which life of which source this is: cluster, timeline, slot and publication at one look."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import psycopg

from cdc.postgres.connection import ANSWER_WITHIN, connect
from cdc.postgres.replication import SystemIdentity, identify
from cdc.postgres.slot import SlotStatus, slot_status
from cdc.postgres.sqlstate import mapped

_PUBLICATION: Final = "SELECT oid FROM pg_publication WHERE pubname = %s"
_UNPUBLISHED: Final = """
    SELECT format('%%s.%%s', c.relnamespace::regnamespace::name, c.relname) FROM pg_class c
    WHERE c.oid = ANY(%(tables)s) AND c.relkind IN ('r', 'p')
    AND NOT EXISTS (SELECT FROM pg_publication_tables t WHERE t.pubname = %(name)s
        AND t.schemaname = c.relnamespace::regnamespace::name AND t.tablename = c.relname)
    AND NOT EXISTS (SELECT FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
        WHERE p.pubname = %(name)s AND r.prrelid = c.oid)
    ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class PublicationStatus:
    """One publication, held against the tables that the log knows."""

    name: str
    oid: int
    """Another one means that it was dropped and made anew."""
    missing: tuple[str, ...]
    """`schema.table` of known tables that still exist and are not in it."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """What a log is held against before it is continued."""

    identity: SystemIdentity
    slot: SlotStatus | None
    publication: PublicationStatus | None


def source_state(dsn: str, slot: str, publication: str, tables: Collection[int]) -> SourceState:
    """Look at the source; `tables` are the OIDs that the log captures."""
    identity = identify(dsn)
    with connect(dsn, application_name="cdc identify", patience=ANSWER_WITHIN) as conn:
        return SourceState(identity, slot_status(conn, slot), publication_status(conn, publication, tables))


def publication_status(conn: psycopg.Connection, name: str, tables: Collection[int]) -> PublicationStatus | None:
    """The publication of that name; None if there is none."""
    with mapped():
        # the publication is looked for last: if it is dropped between the two, it is gone and not merely narrowed
        rows = conn.execute(_UNPUBLISHED, {"tables": sorted(tables), "name": name}).fetchall()
        found = conn.execute(_PUBLICATION, [name]).fetchone()
    if found is None:
        return None
    return PublicationStatus(name, int(found[0]), tuple(text for (text,) in rows))
