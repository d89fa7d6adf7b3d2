"""WalBound: how far the server's WAL goes, as the server says over an SQL connection apart from the stream.

A position in the log cannot be taken back, so none is committed on the word of the stream alone. Before a commit of
the log the server is asked where its WAL ends (on a standby: how far it has replayed, which is as far as it decodes).
The answer is younger than the frame, therefore the WAL of an honest server reaches behind every commit that it has
sent. A position that is not below the answer is an error, and nothing is written. `cdc/pgoutput/lsn_check.py` compares
the stream with itself and finds the lies below that bound.

A reader that is behind does not ask: the last answer bounds what it commits for a long time. A reader that has caught
up asks once per commit, while another thread writes the commit's data files, so that the round trip costs no latency.

The same connection shows that the server shuts down: it ends every SQL session first, and then waits until its
walsenders have been confirmed all of the WAL. Behind the last commit no position is proved, and while the log's disk is
full nothing can be confirmed at all. A reader whose session ended and which gets no other one therefore lets go of its
stream. Nothing is lost: the server sends again what was not confirmed.
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
from cdc.postgres.connection import ANSWER_TIMEOUT, connect
from cdc.postgres.sqlstate import map_errors

_WAL_END: Final = """
    SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END)::text
"""


class WalBound:
    """Of one replication session; a context manager. One thread asks and requires, another checks the session."""

    def __init__(self, dsn: str) -> None:
        """Connect; raises as `connect` does."""
        self._dsn, self._lock = dsn, Lock()
        self._wal_end = Lsn(0)
        self._conn = self._connected()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wal bound")
        self._answer: Future[Lsn] | None = None

    def ask(self, lsn: Lsn) -> None:
        """Ask the server without waiting, unless its last answer covers this LSN; `require` waits for the answer."""
        if lsn >= self._wal_end and self._answer is None:
            self._answer = self._thread.submit(self._current_wal_end)

    def require(self, lsn: Lsn) -> None:
        """Raise PositionBeyondWal if no commit record can be at this LSN, for the WAL of the server ends before it.

        Raises SourceUnreachable and what else `connect` raises if the server cannot be asked.
        """
        self.ask(lsn)
        if self._answer is not None:
            answer, self._answer = self._answer, None
            self._wal_end = answer.result()
        if lsn >= self._wal_end:
            raise PositionBeyondWal(
                f"the stream names a transaction at {lsn}, but the WAL of the server ends at {self._wal_end}"
            )

    def check_session(self) -> None:
        """Open another session if the server ended ours; raises as `connect` does if it gives none, as in a shutdown.

        Does not wait: while the other thread asks, that thread finds it.
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
        return connect(self._dsn, application_name="cdc wal bound", patience=ANSWER_TIMEOUT)

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
        return Lsn.parse(found[0])

    def _is_ended(self) -> bool:
        try:
            poll = select.poll()
            poll.register(self._conn.fileno(), select.POLLIN)
            if poll.poll(0):
                self._conn.pgconn.consume_input()
                self._conn.pgconn.is_busy()  # reads what the server says before it closes
        except psycopg.Error:
            return True
        return self._conn.pgconn.status != pq.ConnStatus.OK
