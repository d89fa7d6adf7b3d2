"""Visibility: which transactions new snapshots see, asked in ways that hide no other role's transactions.

A transaction is in the stream when its commit is in the WAL. Snapshots see it a moment later, or much later: it may
wait for a synchronous standby. `pg_stat_activity` hides when other roles' transactions began; a snapshot and `pg_locks`
hide nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self

import numpy as np
import psycopg
from psycopg import sql

from cdc.errors import CommitNotVisible
from cdc.postgres.sqlstate import map_errors

_XIDS: Final = 1 << 32
_HALF: Final = 1 << 31
# a row of another role's session has its xid, but its start only for roles with pg_read_all_stats
_STARTS: Final = """
    SELECT backend_xid::text::bigint, xact_start FROM pg_stat_activity WHERE backend_xid IS NOT NULL
    UNION ALL SELECT transaction::text::bigint, prepared FROM pg_prepared_xacts
"""
_POLL_INTERVAL: Final = 0.02
"""Seconds between two checks whether transactions have ended; SQL has no statement that waits for their end."""
# the locks of a prepared transaction have a virtualtransaction of their own too
_CHANGES_TABLE: Final = """
    SELECT FROM pg_locks own JOIN pg_locks relation_lock ON relation_lock.virtualtransaction = own.virtualtransaction
    WHERE own.locktype = 'transactionid' AND own.granted AND own.mode = 'ExclusiveLock'
    AND own.transactionid::text::bigint = %(xid)s
    AND relation_lock.locktype = 'relation' AND relation_lock.relation = %(oid)s AND relation_lock.granted
    AND relation_lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND relation_lock.mode NOT IN ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')
"""


@dataclass(frozen=True, slots=True)
class Visibility:
    """The transactions that a snapshot sees: the value of `pg_current_snapshot()`."""

    xmin: int
    """Transaction id below which every committed transaction is visible."""
    xmax: int
    """Transaction id at and above which every transaction is invisible."""
    running: frozenset[int]
    """Ids of the transactions between `xmin` and `xmax` that were running, and so are invisible."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text `xmin:xmax:xip,xip…`, as `pg_current_snapshot()` prints it."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(map(int, filter(None, running.split(",")))))

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, sorted(self.running)))}"

    def sees(self, xids: np.ndarray) -> np.ndarray:
        """Return a boolean array: true for each transaction that the snapshot sees.

        `xids` are the ids of committed transactions, as int64 values without the high 32 bits, as in the stream.
        """
        # the transactions are recent, so of all xids with these low bits the one nearest to xmax is the right one
        whole = self.xmax + ((xids - self.xmax + _HALF) % _XIDS) - _HALF
        return (whole < self.xmax) & ~np.isin(whole, list(self.running))


def open_xids(conn: psycopg.Connection, patience: float) -> frozenset[int]:
    """Return the low 32 bits of the xids of transactions that are open and do not end within `patience` seconds.

    Most transactions end within milliseconds. A transaction that has committed but waits for a synchronous standby is
    open: snapshots do not see it. Every role learns this from a snapshot, whatever
    `pg_stat_activity` hides from it.
    """
    deadline = time.monotonic() + patience
    with map_errors():
        running = read_visibility(conn).running
        while running and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
            running &= read_visibility(conn).running
    return frozenset(xid % _XIDS for xid in running)


def oldest_start(conn: psycopg.Connection, xids: frozenset[int]) -> datetime | None:
    """Return the start of the oldest of these open transactions; None if the role may not see all of the starts.

    `xids` are the low 32 bits of the xids.
    """
    with map_errors():
        starts = conn.execute(_STARTS).fetchall()
    known = [start for xid, start in starts if xid in xids and start is not None]
    return min(known) if known and len(known) == len(xids) else None


def await_definition(conn: psycopg.Connection, oid: int, xid: int, patience: float) -> None:
    """Wait until a new snapshot sees the definition that a table had at the end of a committed transaction.

    A transaction that a snapshot does not see can have changed the definition only while it has a lock on the table
    that is stronger than that of a change of rows. `xid` has the low 32 bits, as in the stream. Raises CommitNotVisible
    after `patience` seconds.
    """
    deadline = time.monotonic() + patience
    with map_errors():
        while not _sees(conn, xid) and conn.execute(_CHANGES_TABLE, {"xid": xid, "oid": oid}).fetchone() is not None:
            if time.monotonic() >= deadline:
                raise CommitNotVisible(
                    f"transaction {xid} changed the definition of a table (OID {oid}) and has committed, but sessions "
                    f"of the source do not see it after {patience:.0f} s"
                )
            time.sleep(_POLL_INTERVAL)


def _sees(conn: psycopg.Connection, xid: int) -> bool:
    return bool(read_visibility(conn).sees(np.array([xid])).all())


def read_visibility(conn: psycopg.Connection) -> Visibility:
    """Return the visibility of a snapshot taken now."""
    with map_errors():
        row = conn.execute("SELECT pg_current_snapshot()::text").fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM has one row
    return Visibility.parse(row[0])


def sees_statistics(conn: psycopg.Connection) -> bool:
    """Return True if the role sees the sessions and walsenders of all roles, and when they did something.

    Without this right the columns are NULL, also those of the role's own walsender.
    """
    with map_errors():
        return conn.execute("SELECT pg_has_role('pg_read_all_stats', 'USAGE')").fetchone() == (True,)


def statistics_grant(role: str) -> str:
    """Return the SQL that gives a role the right that `sees_statistics` asks for."""
    return sql.SQL("GRANT pg_read_all_stats TO {};").format(sql.Identifier(role)).as_string(None)
