"""slot_use: a replication slot and its walsender at one moment, as the server sees them."""

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
    """What the server knows of a slot and of the connection that streams from it."""

    wal_end: Lsn
    slot: SlotStatus | None
    """None if there is no slot of that name."""
    reply_at: str | None
    """When the walsender last got a status update, by the clock of its sender; None before the first one."""
    reply_age: float | None
    """Seconds since then, by the server's clock: wrong by as much as the two clocks differ."""
    inactive_seconds: float | None
    """Since the slot was last streamed from; from version 17."""


def read_slot_use(conn: psycopg.Connection, name: str) -> SlotUse:
    """Ask the server: two short queries, which take no lock."""
    slot = slot_status(conn, name)
    with map_errors():
        row = conn.execute(_USE, [name]).fetchone()
    assert row is not None  # noqa: S101 - a join of one row to the left of others
    wal_end, reply_at, reply_age, inactive = row
    return SlotUse(Lsn.parse(wal_end), slot, reply_at, reply_age, inactive)
