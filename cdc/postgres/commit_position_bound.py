"""WalBound: the end of the WAL of Postgres as an upper bound of commit positions, read over a separate SQL connection.

A wrong position in the log cannot be removed, so the reader does not trust the stream alone. Before each commit of the
log it queries where the WAL of Postgres ends. A standby can decode only applied WAL, so there the query returns the end
of the applied WAL. The query runs after the frames arrived, so its result is above every commit that a correct Postgres
has sent. A position that is not below the result is an error, and nothing is written. `cdc/pgoutput/lsn_check.py`
compares fields of the stream with each other and finds wrong positions below that bound.

A reader that is behind rarely queries, because the last result bounds its commits for a long time. A reader that has
caught up queries once per commit, while another thread writes the commit's data files. So the round trip adds no
latency.

The query also shows that the server is still the one that sends the stream, on the same timeline. A DSN may lead to
another server after a failover, and a standby may be promoted, or replicate from a promoted primary, while the stream
runs. The reader then connects again, so that each commit of the log names the timeline of its transactions. A position
below an earlier result is on the timeline of that time, because a standby has applied it then.

The same connection detects a shutdown of Postgres. Postgres ends all SQL sessions first, and then waits until the
clients of walsenders have confirmed all WAL. The reader cannot confirm WAL after the last commit, and cannot confirm
anything while the log's disk is full, so its open stream could block the shutdown. Therefore a reader that loses its
session and gets no new one closes its stream. Nothing is lost, because Postgres sends unconfirmed changes again.
"""

from __future__ import annotations

import select
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from types import TracebackType
from typing import Final, Self

import psycopg
from psycopg import pq

from cdc.errors import PositionBeyondWal, SourceUnreachable
from cdc.lsn import Lsn
from cdc.postgres.connection import ANSWER_TIMEOUT, check_same_server, connect, server_start
from cdc.postgres.replication import SystemIdentity, identify_system
from cdc.postgres.sqlstate import map_errors

_WAL_END: Final = """
    SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END)::text,
           pg_is_in_recovery()
"""


class WalBound:
    """End of the WAL as upper bound of the commit positions of one replication session; a context manager.

    One thread calls `ask` and `require`, another one calls `check_session`.
    """

    def __init__(self, dsn: str) -> None:
        """Connect to Postgres; raises the errors of `connect`."""
        self._dsn, self._lock = dsn, Lock()
        self._wal_end = Lsn(0)
        self._identity: SystemIdentity | None = None
        self._conn = self._connected()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wal bound")
        self._answer: Future[Lsn] | None = None

    def expect(self, stream: str, identity: SystemIdentity) -> None:
        """Raise SourceUnreachable unless stream, queries and `identity` are of one server; from now on check it.

        stream: start time of the server that sends the stream.
        """
        check_same_server(stream, identity.started)
        check_same_server(server_start(self._conn), identity.started)
        self._identity = identity

    def ask(self, lsn: Lsn) -> None:
        """Start a query of the WAL end, and return at once; `require` waits for the result.

        Do nothing if the last result is above this LSN, or if a query is already running.
        """
        if lsn >= self._wal_end and self._answer is None:
            self._answer = self._thread.submit(self._current_wal_end)

    def require(self, lsn: Lsn) -> None:
        """Raise PositionBeyondWal if the WAL of Postgres ends at or before this LSN.

        A commit record cannot begin at or after the end of the WAL.

        Raises SourceUnreachable and the other errors of `connect` if the query fails.
        """
        self.ask(lsn)
        if self._answer is not None:
            answer, self._answer = self._answer, None
            self._wal_end = answer.result()
        if lsn >= self._wal_end:
            raise PositionBeyondWal(
                f"the stream contains a transaction at {lsn}, but the WAL of the server ends at {self._wal_end}"
            )

    def check_session(self) -> None:
        """Reconnect if Postgres has ended the session. Raises the errors of `connect`, for example during a shutdown.

        While a query of `ask` runs, this method returns at once, because the query itself detects a lost session.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._is_ended():
                self._conn.close()
                self._conn = self._connected()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        self._conn.close()

    def _connected(self) -> psycopg.Connection:
        conn = connect(self._dsn, application_name="cdc wal bound", timeout=ANSWER_TIMEOUT)
        if self._identity is not None:
            check_same_server(server_start(conn), self._identity.started)
        return conn

    def _current_wal_end(self) -> Lsn:
        with self._lock:
            try:
                return self._query()
            except SourceUnreachable:
                self._conn.close()
                self._conn = self._connected()
                return self._query()

    def _query(self) -> Lsn:
        with map_errors():
            found = self._conn.execute(_WAL_END).fetchone()
        assert found is not None  # noqa: S101 - the query gives one row
        wal_end, in_recovery = found
        if self._identity is not None and (in_recovery or self._identity.in_recovery):
            self._check_timeline(self._identity)
        return Lsn.parse(wal_end)

    def _check_timeline(self, expected: SystemIdentity) -> None:
        """Raise SourceUnreachable if the timeline of a standby has changed since the session began."""
        now = identify_system(self._dsn)
        check_same_server(now.started, expected.started)
        if now.timeline != expected.timeline:
            raise SourceUnreachable(
                f"the standby changed from timeline {expected.timeline} to {now.timeline}: the reader connects again"
            )

    def _is_ended(self) -> bool:
        try:
            poll = select.poll()
            poll.register(self._conn.fileno(), select.POLLIN)
            if poll.poll(0):
                self._conn.pgconn.consume_input()
                self._conn.pgconn.is_busy()  # reads the message that the server sends before it closes the session
        except psycopg.Error:
            return True
        return self._conn.pgconn.status != pq.ConnStatus.OK
