"""Replication slots: what one looks like, how it is made with an exported snapshot, how it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from cdc.errors import SlotInUse
from cdc.lsn import Lsn
from cdc.postgres.connection import connect
from cdc.postgres.quoting import identifier
from cdc.postgres.sqlstate import mapped

PLUGIN: Final = "pgoutput"

# to_jsonb: invalidation_reason came with version 17, and a missing key is null
_STATUS: Final = """
    SELECT s.slot_name, s.plugin, s.database, s.active, s.active_pid, s.restart_lsn::text, s.confirmed_flush_lsn::text,
           s.wal_status, s.safe_wal_size, to_jsonb(s) ->> 'invalidation_reason',
           coalesce(greatest(pg_wal_lsn_diff(w.wal_end, s.restart_lsn), 0), 0)::bigint, w.wal_end::text
    FROM pg_replication_slots s,
         (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END) w(wal_end)
    WHERE s.slot_name = %s
"""


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One row of `pg_replication_slots`."""

    name: str
    plugin: str | None
    """None for a physical slot."""
    database: str | None
    active: bool
    active_pid: int | None
    restart_lsn: Lsn | None
    """None once the slot is invalidated."""
    confirmed_flush: Lsn | None
    wal_status: str | None
    """`reserved`, `extended`, `unreserved`, `lost`."""
    safe_wal_size: int | None
    """Bytes that may still be written before the slot is in danger; None without a limit."""
    invalidation_reason: str | None
    """From version 17."""
    retained_bytes: int
    """WAL that the server keeps for this slot."""
    wal_end: Lsn
    """Where the server's WAL ended at this moment."""


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """The state of the database at the slot's consistent point."""

    consistent_point: Lsn
    """Everything that committed below it is in the snapshot; everything else comes through the slot."""
    name: str
    """For SET TRANSACTION SNAPSHOT, while the connection that made it does nothing else."""


def slot_status(conn: psycopg.Connection, name: str) -> SlotStatus | None:
    """The slot of that name, of any plugin and database; None if there is none."""
    with mapped():
        row = conn.execute(_STATUS, [name]).fetchone()
    if row is None:
        return None
    fields: list[Any] = list(row)
    fields[5:7] = (Lsn.parse(text) if text else None for text in fields[5:7])
    fields[-1] = Lsn.parse(fields[-1])
    return SlotStatus(*fields)


def drop_slot(conn: psycopg.Connection, name: str) -> None:
    """Remove the slot; nothing happens if there is none. Raises SlotInUse while somebody streams from it."""
    with mapped():
        conn.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", [name]
        )


@contextmanager
def exclusive(conn: psycopg.Connection, name: str) -> Iterator[None]:
    """Hold the right to copy for a slot, by an advisory lock that goes with the connection.

    Raises SlotInUse while another session holds it.
    """
    with mapped():
        row = conn.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [f"cdc copy {name}"]).fetchone()
    if row is None or not row[0]:
        raise SlotInUse(f"another reader copies for slot {name!r}")
    try:
        yield
    finally:
        with mapped():
            conn.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", [f"cdc copy {name}"])


@contextmanager
def create_slot(dsn: str, name: str, *, temporary: bool = False) -> Iterator[ExportedSnapshot]:
    """Make a pgoutput slot; its snapshot can be taken over inside the block.

    A permanent slot stays after the block whatever happens in it, a temporary one goes with it. Waits
    for the end of every transaction that is open when it starts. Raises PreflightFailed without
    privilege or free slot, SourceError (42710) if the name is taken.
    """
    kind = " TEMPORARY" if temporary else ""
    command = f"CREATE_REPLICATION_SLOT {identifier(name)}{kind} LOGICAL {PLUGIN} EXPORT_SNAPSHOT"
    with connect(dsn, replication=True, application_name="cdc slot") as conn:
        with mapped():
            row = conn.execute(command.encode()).fetchone()
        assert row is not None  # noqa: S101 - the protocol promises one row
        yield ExportedSnapshot(Lsn.parse(row[1]), row[2])
