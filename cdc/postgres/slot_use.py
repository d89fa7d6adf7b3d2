"""Status of a replication slot and its walsender, from the server's views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psycopg

from cdc.lsn import Lsn
from cdc.postgres.slot import SlotStatus, slot_status
from cdc.postgres.sqlstate import map_errors

# to_jsonb: inactive_since came with version 17. pg_stat_replication shows a role its own walsenders.
_USE: Final = """
    SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END)::text,
           r.reply_time::text, extract(epoch FROM clock_timestamp() - r.reply_time)::float8,
           extract(epoch FROM clock_timestamp() - (to_jsonb(s) ->> 'inactive_since')::timestamptz)::float8
    FROM (SELECT) AS always
    LEFT JOIN pg_replication_slots s ON s.slot_name = %s
    LEFT JOIN pg_stat_replication r ON r.pid = s.active_pid
"""


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Status of a slot and of the walsender that streams from it."""

    wal_end: Lsn
    slot: SlotStatus | None
    """None if there is no slot of that name."""
    reply_at: str | None
    """Time of the last status update, by the clock of its sender; None before the first one."""
    reply_age: float | None
    """Seconds since then by the server's clock; includes the difference of the two clocks."""
    inactive_seconds: float | None
    """Seconds since the slot was last active; from version 17."""


def read_slot_use(conn: psycopg.Connection, name: str) -> SlotUse:
    """Read the status with two short queries that take no locks."""
    slot = slot_status(conn, name)
    with map_errors():
        row = conn.execute(_USE, [name]).fetchone()
    assert row is not None  # noqa: S101 - a join of one row to the left of others
    wal_end, reply_at, reply_age, inactive = row
    return SlotUse(Lsn.parse(wal_end), slot, reply_at, reply_age, inactive)
