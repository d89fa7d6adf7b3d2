"""Replication slots: their status, creation with an exported snapshot, advancing and dropping."""

from __future__ import annotations

import select
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg
from psycopg import pq

from cdc.errors import SlotBlocked, SlotInUse, SlotMissing
from cdc.failpoint import hit
from cdc.lsn import Lsn
from cdc.postgres.connection import connect
from cdc.postgres.replication import error_from_result, quote_identifier
from cdc.postgres.sqlstate import map_errors

PLUGIN: Final = "pgoutput"

BLOCKED_AFTER: Final = 10.0
"""Maximum seconds for creating a slot; then SlotBlocked names the transactions that prevent it."""
FAILOVER_SINCE: Final = 170000
"""First version of Postgres with failover slots."""

# to_jsonb: columns that came with later versions are null in older ones
_STATUS: Final = """
    SELECT s.slot_name, s.plugin, s.database, s.active, s.active_pid, s.restart_lsn::text, s.confirmed_flush_lsn::text,
           s.wal_status, s.safe_wal_size, to_jsonb(s) ->> 'invalidation_reason',
           coalesce(greatest(pg_wal_lsn_diff(w.wal_end, s.restart_lsn), 0), 0)::bigint, w.wal_end::text,
           coalesce((to_jsonb(s) ->> 'failover')::boolean, false), to_jsonb(s) ->> 'inactive_since',
           (to_jsonb(s) ->> 'synced')::boolean, to_jsonb(s) ->> 'slotsync_skip_reason'
    FROM pg_replication_slots s,
         (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END) w(wal_end)
    WHERE s.slot_name = %s OR %s::text IS NULL ORDER BY s.slot_name
"""
_BLOCKERS: Final = """
    SELECT format('pid %%s (%%s, xid %%s%%s)', pid, coalesce(nullif(application_name, ''), usename),
                  backend_xid, ', open since ' || date_trunc('second', xact_start))
    FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() AND pid <> %(own)s
    UNION ALL
    SELECT format('prepared transaction %%L (xid %%s, since %%s)', gid, transaction, date_trunc('second', prepared))
    FROM pg_prepared_xacts
"""
_LIMITS: Final = """
    SELECT name, setting || coalesce(unit, '') FROM pg_settings
    WHERE name IN ('max_slot_wal_keep_size', 'idle_replication_slot_timeout', 'max_replication_slots')
"""
# to_jsonb: inactive_since came with version 17. A role without pg_read_all_stats sees no reply_time, not even its own.
_USE: Final = """
    SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END)::text,
           r.reply_time::text, extract(epoch FROM clock_timestamp() - r.reply_time)::float8,
           extract(epoch FROM clock_timestamp() - (to_jsonb(s) ->> 'inactive_since')::timestamptz)::float8
    FROM (SELECT) AS always
    LEFT JOIN pg_replication_slots s ON s.slot_name = %s
    LEFT JOIN pg_stat_replication r ON r.pid = s.active_pid
"""


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """Status of one replication slot, from its row in `pg_replication_slots`."""

    name: str
    plugin: str | None
    """Name of the output plugin; None for a physical slot."""
    database: str | None
    active: bool
    active_pid: int | None
    restart_lsn: Lsn | None
    """LSN from which Postgres keeps WAL for the slot; None once the slot is invalidated."""
    confirmed_flush: Lsn | None
    wal_status: str | None
    """State of the WAL that the slot needs: `reserved`, `extended`, `unreserved` or `lost`."""
    safe_wal_size: int | None
    """Bytes of WAL that may be written before the slot is in danger of invalidation; None without a limit."""
    invalidation_reason: str | None
    """Why the slot was invalidated; None if it is valid. Always None before Postgres 17."""
    retained_bytes: int
    """Bytes of WAL that Postgres keeps for this slot."""
    wal_end: Lsn
    """LSN at which the WAL of Postgres ended when the status was read."""
    failover: bool = False
    """True if standbys synchronize the slot; always False before Postgres 17."""
    inactive_since: str | None = None
    """Time since which the slot is inactive; None while it is active. Always None before Postgres 17."""
    synced: bool | None = None
    """True if a standby synchronized the slot from its primary, also after its promotion; None before Postgres 17."""
    skip_reason: str | None = None
    """Why a standby did not synchronize the slot the last time; None if it did. Always None before Postgres 19."""


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """A snapshot of the database at the consistent point of a new slot."""

    consistent_point: Lsn
    """LSN that separates snapshot and slot.

    Transactions that committed below it are in the snapshot; the slot sends all others.
    """
    name: str
    """Name for SET TRANSACTION SNAPSHOT; valid until the exporting connection runs another command."""


def slot_status(conn: psycopg.Connection, name: str) -> SlotStatus | None:
    """Return the status of the slot with that name, of any plugin and database; None if it does not exist."""
    return next(iter(_statuses(conn, name)), None)


def all_slots(conn: psycopg.Connection) -> list[SlotStatus]:
    """Return the status of all slots of the cluster, physical ones too, sorted by name."""
    return _statuses(conn, None)


def slot_limits(conn: psycopg.Connection) -> dict[str, str]:
    """Return the settings that limit the number, WAL or idle time of slots, with units, if this Postgres has them."""
    with map_errors():
        return {str(name): str(value) for name, value in conn.execute(_LIMITS)}


def drop_slot(conn: psycopg.Connection, name: str, *, confirmed: Lsn | None = None) -> None:
    """Drop the slot if it exists. Raises SlotInUse while it is active.

    With `confirmed`, drop the slot only if this is its confirmed position.
    """
    with map_errors():
        conn.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
            "WHERE slot_name = %s AND (%s::pg_lsn IS NULL OR confirmed_flush_lsn = %s::pg_lsn)",
            [name, *[None if confirmed is None else str(confirmed)] * 2],
        )


def advance_slot(conn: psycopg.Connection, name: str, upto: Lsn) -> Lsn:
    """Advance the slot without streaming, and return its new position.

    Raises SlotInUse while the slot is active, SlotInvalidated and SourceError for errors of Postgres.
    """
    with map_errors():
        row = conn.execute(
            "SELECT end_lsn::text FROM pg_replication_slot_advance(%s, %s)", [name, str(upto)]
        ).fetchone()
    assert row is not None  # noqa: S101 - the function gives one row
    return Lsn.parse(row[0])


@contextmanager
def copy_lock(conn: psycopg.Connection, name: str) -> Iterator[None]:
    """Take the advisory lock for copying tables with this slot, and release it after the block.

    The end of the connection also releases the lock. Raises SlotInUse while another session has the lock.
    """
    with map_errors():
        row = conn.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [f"cdc copy {name}"]).fetchone()
    if row is None or not row[0]:
        raise SlotInUse(f"another process is already copying tables for slot {name!r}")
    try:
        yield
    finally:
        with map_errors():
            conn.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", [f"cdc copy {name}"])


@contextmanager
def create_slot(
    dsn: str, name: str, *, temporary: bool = False, failover: bool = False, timeout: float = BLOCKED_AFTER
) -> Iterator[ExportedSnapshot]:
    """Create a pgoutput slot, and yield its exported snapshot, which can be used inside the block.

    A permanent slot remains after the block, a temporary one does not. Postgres completes the slot only after the end
    of every transaction that is open now. After `timeout` seconds SlotBlocked names the open transactions, and no slot
    remains. Raises PreflightFailed if the role may not create slots or no slot is free, and SourceError (42710) if a
    slot of this name exists.
    """
    with connect(dsn, replication=True, application_name="cdc slot") as conn:
        kind = " TEMPORARY" if temporary else ""
        # version 15 introduced the option list in parentheses
        options = "(SNAPSHOT 'export', FAILOVER)" if failover else "EXPORT_SNAPSHOT"
        command = f"CREATE_REPLICATION_SLOT {quote_identifier(name)}{kind} LOGICAL {PLUGIN} {options}"
        yield _create(conn, dsn, command, timeout)


@dataclass(frozen=True, slots=True)
class DraftSlot:
    """A temporary slot that can become a permanent one, and the snapshot of the database at its consistent point."""

    dsn: str
    name: str
    snapshot: ExportedSnapshot

    def keep(
        self, conn: psycopg.Connection, name: str, record: Callable[[SlotStatus], None], *, failover: bool = False
    ) -> None:
        """Create a permanent slot with the positions of this slot.

        Before the permanent slot is created, `record` is called with the status that the slot will have. So if the
        process is killed, either there is no permanent slot, or its positions are recorded.
        """
        draft_status = slot_status(conn, self.name)
        if draft_status is None:
            raise SlotMissing(f"the reader's slot was not created: its temporary slot {self.name!r} no longer exists")
        record(replace(draft_status, name=name, active=False, active_pid=None))
        hit("slot_recorded")
        with map_errors():
            conn.execute("SELECT FROM pg_copy_logical_replication_slot(%s, %s, false)", [self.name, name])
        hit("slot_created")
        if failover:
            _enable_failover(self.dsn, name)


@contextmanager
def create_draft_slot(dsn: str) -> Iterator[DraftSlot]:
    """Create a temporary slot, which exists inside the block; raises the errors of `create_slot`."""
    name = f"cdc_draft_{uuid.uuid4().hex[:12]}"
    with create_slot(dsn, name, temporary=True) as snapshot:
        yield DraftSlot(dsn, name, snapshot)


def _enable_failover(dsn: str, name: str) -> None:
    """Set the failover property of a slot, which a copied slot does not inherit."""
    with connect(dsn, replication=True, application_name="cdc slot") as conn, map_errors():
        conn.execute(f"ALTER_REPLICATION_SLOT {quote_identifier(name)} (FAILOVER)".encode())


def _create(conn: psycopg.Connection, dsn: str, command: str, timeout: float) -> ExportedSnapshot:
    deadline = time.monotonic() + timeout
    with map_errors():
        conn.pgconn.send_query(command.encode())
        while conn.pgconn.is_busy():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise _blocked(conn, dsn, timeout)
            _wait_readable(conn, remaining)
            conn.pgconn.consume_input()
        answer = conn.pgconn.get_result()
        while conn.pgconn.get_result() is not None:
            pass
    assert answer is not None  # noqa: S101 - every command is answered
    if answer.status != pq.ExecStatus.TUPLES_OK:
        raise error_from_result(answer)
    point, snapshot = (answer.get_value(0, column) or b"" for column in (1, 2))
    return ExportedSnapshot(Lsn.parse(point.decode()), snapshot.decode())


def _wait_readable(conn: psycopg.Connection, seconds: float) -> None:
    poll = select.poll()
    poll.register(conn.pgconn.socket, select.POLLIN)
    poll.poll(seconds * 1000)


def _blocked(conn: psycopg.Connection, dsn: str, timeout: float) -> SlotBlocked:
    """Cancel the creation of a slot, and return the error that names the open transactions.

    Postgres then removes the incomplete slot.
    """
    with connect(dsn, application_name="cdc slot") as other, map_errors():
        rows = other.execute(_BLOCKERS, {"own": conn.info.backend_pid}).fetchall()
    conn.cancel_safe()
    while conn.pgconn.get_result() is not None:
        pass
    listed = ", ".join(text for (text,) in rows) or "none any more"
    return SlotBlocked(
        f"the slot cannot be created yet: older transactions are still open after {timeout:.0f} s: {listed}"
    )


def _statuses(conn: psycopg.Connection, name: str | None) -> list[SlotStatus]:
    with map_errors():
        rows = conn.execute(_STATUS, [name, name]).fetchall()
    return [_status(list(row)) for row in rows]


def _status(fields: list[Any]) -> SlotStatus:
    fields[5:7] = (Lsn.parse(text) if text else None for text in fields[5:7])
    fields[11] = Lsn.parse(fields[11])
    return SlotStatus(*fields)


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Status of a slot and of the walsender that streams from it."""

    wal_end: Lsn
    slot: SlotStatus | None
    """Status of the slot; None if it does not exist."""
    reply_at: str | None
    """Time of the reader's last status update, by the clock of the reader's machine.

    None before the first update, and for a role that may not see statistics (`visibility.sees_statistics`).
    """
    reply_age: float | None
    """Seconds since `reply_at` by the clock of Postgres; it includes the difference between both clocks."""
    inactive_seconds: float | None
    """Seconds since the slot was last active; None while it is active. Always None before Postgres 17."""


def read_slot_use(conn: psycopg.Connection, name: str) -> SlotUse:
    """Read the status of a slot and its walsender with two short queries that take no locks."""
    slot = slot_status(conn, name)
    with map_errors():
        row = conn.execute(_USE, [name]).fetchone()
    assert row is not None  # noqa: S101 - a join of one row to the left of others
    wal_end, reply_at, reply_age, inactive = row
    return SlotUse(Lsn.parse(wal_end), slot, reply_at, reply_age, inactive)


def log_standby_snapshot(conn: psycopg.Connection) -> None:
    """Make the primary write its running transactions to the WAL; the creation of a slot on a standby waits for that.

    Do nothing if the role may not call the function, or if this version of Postgres does not have it.
    """
    with map_errors(), suppress(psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedFunction):
        conn.execute("SELECT pg_log_standby_snapshot()")
