"""Load: a thread that inserts and updates one key after the other, and survives a restart of the server."""

from __future__ import annotations

from contextlib import suppress
from threading import Event, Thread
from types import TracebackType
from typing import Self

import psycopg

from cdc.errors import SourceError
from cdc.postgres.connection import connect

PAUSE = 0.02
"""Seconds between two transactions: the servers and readers under test need the processor more."""
TABLE = "CREATE TABLE t (id bigint PRIMARY KEY, v text)"


class Load:
    """Transactions of three changes each against `t`; a context manager."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._over = Event()
        self._thread = Thread(target=self._live, name="load", daemon=True)
        self.transactions = 0

    def stop(self) -> None:
        """After the transaction that runs."""
        self._over.set()
        self._thread.join()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _live(self) -> None:
        while not self._over.wait(0.05):
            with suppress(SourceError, psycopg.Error), connect(self._dsn, application_name="cdc test load") as conn:
                while not self._over.wait(PAUSE):
                    self._write(conn)

    def _write(self, conn: psycopg.Connection) -> None:
        with conn.transaction():
            conn.execute(
                "INSERT INTO t SELECT (SELECT coalesce(max(id), 0) FROM t) + n, 'x' FROM generate_series(1, 2) n"
            )
            conn.execute("UPDATE t SET v = v || 'y' WHERE id = (SELECT max(id) FROM t)")
        self.transactions += 1
