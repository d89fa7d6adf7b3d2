"""Connections with the session settings that every value in the log is read under."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Final, TypeVar

import psycopg
from psycopg import conninfo, sql

from cdc.errors import MalformedDsn
from cdc.postgres.sqlstate import connection_failure

PINNED: Final = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "timezone": "UTC",
    # the text of a regclass and its kin
    "quote_all_identifiers": "off",
    # a row that a policy hides would be missing from a copy without a word: an error is better
    "row_security": "off",
    # timeouts set for people's sessions must not cut a copy or a stream that runs for hours
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
"""In the startup packet, so that they hold before the first statement and in the walsender too.

The first six decide the text of values; the same text must come from COPY and from the stream.
"""

CONNECT_TIMEOUT: Final = 10
"""Seconds, unless the DSN says otherwise; libpq's default waits for ever."""

_LINK: Final[dict[str, Any]] = {
    # a peer that vanished is noticed after about a minute, not after the kernel's two hours
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    # the same for a peer that vanished while it owes us an acknowledgement, where no keepalive is sent; milliseconds
    "tcp_user_timeout": 60_000,
}
ANSWER_TIMEOUT: Final = 30.0
"""Seconds that a look at the catalogue may take, which else takes milliseconds: behind a proxy that forgot the
connection an answer never comes, and TCP does not notice."""

_T = TypeVar("_T")
_RAW: Final = "SQL_ASCII"
_PORTS: Final = re.compile(r"(\d{1,5})?(,(\d{1,5})?)*", re.ASCII)


class _Connection(psycopg.Connection):
    """One whose statements are given up after `patience` seconds, and the connection with them."""

    patience: float | None = None

    def wait(self, gen: Generator[Any, Any, _T], *args: Any, **named: Any) -> _T:
        if self.patience is None:
            return super().wait(gen, *args, **named)
        try:
            return super().wait(_within(self.patience, gen), *args, **named)
        except TimeoutError:
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer within {self.patience:g} seconds") from None


def _within(seconds: float, steps: Generator[Any, Any, _T]) -> Generator[Any, Any, _T]:
    """The same steps; psycopg's wait comes by every tenth of a second although nothing is ready."""
    deadline, ready = time.monotonic() + seconds, None
    while True:
        try:
            wanted = steps.send(ready)
        except StopIteration as done:
            result: _T = done.value
            return result
        ready = yield wanted
        if not ready and time.monotonic() > deadline:
            raise TimeoutError


def connect(
    dsn: str,
    *,
    autocommit: bool = True,
    replication: bool = False,
    application_name: str = "cdc",
    patience: float | None = None,
) -> psycopg.Connection:
    """A connection under the pinned settings, to a walsender if `replication`.

    With `patience` a statement that takes more seconds raises SourceUnreachable; without, it may take for ever.

    Raises MalformedDsn, SourceUnreachable and what sqlstate.classify gives; no message holds the password.
    """
    parameters = parse_dsn(dsn)
    pinned = " ".join(f"-c {name}={value}" for name, value in PINNED.items())
    parameters["options"] = f"{parameters.get('options', '')} {pinned}".strip()
    parameters |= {"client_encoding": "UTF8", "application_name": application_name}
    for name, value in {"connect_timeout": CONNECT_TIMEOUT, **_LINK}.items():
        parameters.setdefault(name, value)
    if replication:
        parameters["replication"] = "database"
    try:
        conn = _Connection.connect("", autocommit=autocommit, **parameters)
        conn.patience = patience
        return conn
    except psycopg.Error as error:
        failure = connection_failure(error, secrets=secrets_of(parameters))
    # outside of the except clause: libpq's own text must not hang on as the context of ours
    raise failure


def cancel_statement(conn: psycopg.Connection) -> None:
    """Have the server end the statement that another thread waits for, if it runs one; nothing if that fails."""
    with suppress(psycopg.Error):
        conn.cancel_safe()


def is_sql_ascii(conn: psycopg.Connection) -> bool:
    """Whether the database declares no encoding (SQL_ASCII): its text is bytes that nobody has checked."""
    return conn.info.parameter_status("server_encoding") == _RAW


def disable_encoding_conversion(conn: psycopg.Connection) -> None:
    """Let text come as it is stored, where the server would refuse what is not UTF-8; only for a raw database.

    Text that psycopg reads in this session comes as bytes until `SET client_encoding TO UTF8`.
    """
    conn.execute(sql.SQL("SET client_encoding TO {}").format(sql.Literal(_RAW)))


def parse_dsn(dsn: str) -> dict[str, Any]:
    """The parameters of a URI or key-value DSN; raises MalformedDsn, which repeats no part of it.

    libpq's own complaint quotes the place where it stumbled, which may be the password's middle.
    """
    parameters: dict[str, Any] | None = None
    with suppress(psycopg.Error, ValueError):
        parameters = dict(conninfo.conninfo_to_dict(dsn))
    if parameters is None:
        raise MalformedDsn("malformed dsn: expected postgresql://user:password@host:port/database or key=value pairs")
    places = (str(parameters.get(name, "")) for name in ("host", "hostaddr", "dbname"))
    # an unescaped @ or / in a password moves its tail into the host, the port or the database
    if any("@" in place for place in places) or not _PORTS.fullmatch(str(parameters.get("port", ""))):
        raise MalformedDsn("malformed dsn: host, port or database looks like a part of the password")
    return parameters


def secrets_of(parameters: dict[str, Any]) -> tuple[str, ...]:
    """The values among the parameters that no message may repeat."""
    return tuple(str(value) for name, value in parameters.items() if "password" in name and value)
