"""Connections to the source with pinned session settings, so that every value has the same text form."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, TypeVar

import psycopg
from psycopg import conninfo

from cdc.errors import MalformedDsn, PreflightFailed, SourceUnreachable
from cdc.postgres.sqlstate import PAST_THE_PROXY, connection_failure, map_errors

PINNED: Final = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "timezone": "UTC",
    # text of regclass and similar types
    "quote_all_identifiers": "off",
    # raise an error instead of silently leaving out rows that a policy hides
    "row_security": "off",
    # timeouts for interactive sessions must not cancel a copy or a stream that runs for hours
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    # an error ends a statement, and cdc decides what follows
    "exit_on_error": "off",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    # text of keys and conditions means the same as in a new database
    "standard_conforming_strings": "on",
    "array_nulls": "on",
    "transform_null_equals": "off",
    # otherwise an index may leave out rows at random
    "gin_fuzzy_search_limit": "0",
}
"""Session settings in the startup packet, so that they apply from the first statement and in the walsender too.

The first six determine the text form of values, which must be the same in COPY and in the stream. A role, a database or
the server may set each of them; these values have precedence.
"""

_PINNED_SINCE: Final = {170000: ("transaction_timeout", "0")}
"""Settings that older servers do not know and would refuse in the startup packet, by the first version with them."""

CONNECT_TIMEOUT: Final = 10
"""Maximum seconds for connecting, unless the DSN sets another limit; libpq's default is no limit."""

HOST_TIMEOUT: Final = 3
"""The same for each host of a DSN with several hosts, of which one may be dead; libpq tries them in turn."""

_DEAD_PEER_DETECTION: Final[dict[str, Any]] = {
    # detect a dead peer after about a minute instead of the kernel's two hours
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    # the same for a peer that does not acknowledge sent data, when the kernel sends no keepalives; milliseconds
    "tcp_user_timeout": 60_000,
}
ANSWER_TIMEOUT: Final = 30.0
"""Maximum seconds for a query of the system catalogs, which normally takes milliseconds.

A proxy that lost its connection to Postgres never answers, and TCP does not detect that.
"""

_T = TypeVar("_T")
_PREFERRED: Final = dict[str, tuple[str, str]]()
"""For each list of several hosts: host and port to which the last connection of this process was made."""
_NAME_LENGTH: Final = 63
"""Number of characters of an application name that Postgres keeps."""
_PORTS: Final = re.compile(r"(\d{1,5})?(,(\d{1,5})?)*", re.ASCII)


class _Connection(psycopg.Connection):
    """A connection that is closed when a statement takes longer than `answer_timeout` seconds.

    An error of psycopg does not leave a `with` block of the connection, so none reaches a person without a code.
    """

    answer_timeout: float | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End and close the connection; an error of psycopg leaves the block as an error of cdc."""
        with map_errors():
            super().__exit__(kind, error, trace)
            if isinstance(error, psycopg.Error):
                raise error

    def wait(self, gen: Generator[Any, Any, _T], *args: Any, **named: Any) -> _T:
        if self.answer_timeout is None:
            return super().wait(gen, *args, **named)
        try:
            return super().wait(_within(self.answer_timeout, gen), *args, **named)
        except TimeoutError:
            self.pgconn.finish()
            raise psycopg.OperationalError(
                f"the source did not answer within {self.answer_timeout:g} seconds"
            ) from None


def _within(seconds: float, steps: Generator[Any, Any, _T]) -> Generator[Any, Any, _T]:
    """Run the steps of a psycopg generator, and raise TimeoutError if they take longer than `seconds`.

    psycopg resumes this generator at least every 0.1 seconds, so the deadline is checked even if no input arrives.
    """
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
    timeout: float | None = None,
) -> psycopg.Connection:
    """Connect with the pinned session settings; with `replication` the server process is a walsender.

    A statement that takes more than `timeout` seconds raises SourceUnreachable; None means no limit. This function
    raises MalformedDsn, SourceUnreachable and the errors of `sqlstate.classify`; no message contains the password.
    """
    parameters = parse_dsn(dsn)
    settings, escaped_space = PINNED | {"application_name": application_name}, "\\ "
    pinned = " ".join(f"-c {name}={value.replace(' ', escaped_space)}" for name, value in settings.items())
    parameters["options"] = f"{parameters.get('options', '')} {pinned}".strip()
    # empty: the name arrives only with the options, so its report proves that no proxy has dropped them
    parameters |= {"client_encoding": "UTF8", "application_name": ""}
    several = _with_preferred_host_first(parameters)
    timeouts = {"connect_timeout": CONNECT_TIMEOUT if several is None else HOST_TIMEOUT}
    for name, value in {**timeouts, **_DEAD_PEER_DETECTION}.items():
        parameters.setdefault(name, value)
    if replication:
        parameters["replication"] = "database"
    try:
        conn = _Connection.connect("", autocommit=True, **parameters)
        _check_options_arrived(conn, application_name)
        _pin_newer_settings(conn)
        conn.autocommit = autocommit
        conn.answer_timeout = timeout
        if several is not None:
            _PREFERRED[several] = conn.info.host, str(conn.info.port)
        return conn
    except psycopg.Error as error:
        failure = connection_failure(error, secrets=secrets_of(parameters))
    # outside of the except clause, so that libpq's own text is not the context of this error
    raise failure


def _check_options_arrived(conn: psycopg.Connection, application_name: str) -> None:
    """Raise PreflightFailed if the session does not have the pinned settings.

    PgBouncer with `ignore_startup_parameters = options` drops them. Values would then have another text form, and row
    security could hide rows.
    """
    reported = conn.info.parameter_status("application_name") or ""
    if reported[:_NAME_LENGTH] != application_name[:_NAME_LENGTH]:
        conn.close()
        raise PreflightFailed(
            "a proxy in front of the source drops the settings of the session (startup parameter 'options')",
            remedy=PAST_THE_PROXY,
        )


def _pin_newer_settings(conn: psycopg.Connection) -> None:
    """Pin the settings that not every server knows; `conn` is in autocommit mode, and may be a walsender's."""
    for version, (name, value) in _PINNED_SINCE.items():
        if conn.info.server_version >= version:
            conn.execute(f"SET {name} = {value}".encode())


def _with_preferred_host_first(parameters: dict[str, Any]) -> str | None:
    """Move the host of the last connection to the front of several hosts; return their list as the DSN has it.

    A dead host then costs its timeout once, and not at each connection. Returns None if the DSN has at most one host,
    or addresses in `hostaddr`.
    """
    text = str(parameters.get("host", ""))
    hosts = text.split(",")
    if len(hosts) == 1 or "hostaddr" in parameters:
        return None
    ports = str(parameters.get("port", "")).split(",")
    known = f"{text} {parameters.get('port', '')}"
    servers = list(zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=False))
    servers.sort(key=lambda server: server != _PREFERRED.get(known))
    parameters["host"] = ",".join(host for host, _ in servers)
    if "port" in parameters:
        parameters["port"] = ",".join(port for _, port in servers)
    return known


def dsn_of_each_host(dsn: str) -> list[tuple[str, str]]:
    """Return each host of a DSN, with a DSN that leads to this host alone, whether it accepts writes or not."""
    parameters = parse_dsn(dsn)
    parameters.pop("target_session_attrs", None)
    lists = {name: str(parameters[name]).split(",") for name in ("host", "hostaddr", "port") if parameters.get(name)}
    count = max((len(values) for values in lists.values()), default=1)
    found = []
    for index in range(count):
        own = {name: values[index] if len(values) > 1 else values[0] for name, values in lists.items()}
        label = ":".join(own[name] for name in ("host", "port") if name in own) or "local"
        found.append((label, conninfo.make_conninfo("", **{**parameters, **own})))
    return found


def server_start(conn: psycopg.Connection) -> str:
    """Return the time at which Postgres was started, which differs between the servers that a DSN may lead to.

    Works on a replication connection too.
    """
    with map_errors():
        row = conn.execute(b"SELECT pg_postmaster_start_time()::text").fetchone()
    assert row is not None  # noqa: S101 - the query gives one row
    return str(row[0])


def check_same_server(found: str, expected: str) -> None:
    """Raise SourceUnreachable unless two connections, given by their `server_start`, reached the same server."""
    if found != expected:
        raise SourceUnreachable(
            "two connections reached different servers, or the server was restarted: the reader connects again"
        )


def cancel_statement(conn: psycopg.Connection) -> None:
    """Cancel the statement that another thread runs on this connection; do nothing if that fails."""
    with suppress(psycopg.Error):
        conn.cancel_safe()


def parse_dsn(dsn: str) -> dict[str, Any]:
    """Return the parameters of a DSN, which is a URI or a list of keys and values.

    Raises MalformedDsn, which repeats no part of the DSN. libpq's own error message quotes the DSN around the mistake,
    which may be inside the password.
    """
    parameters: dict[str, Any] | None = None
    with suppress(psycopg.Error, ValueError):
        parameters = dict(conninfo.conninfo_to_dict(dsn))
    if parameters is None:
        raise MalformedDsn("malformed dsn: expected postgresql://user:password@host:port/database or key=value pairs")
    values = (str(parameters.get(name, "")) for name in ("host", "hostaddr", "dbname"))
    # an unescaped @ or / in a password moves its tail into the host, the port or the database
    if any("@" in value for value in values) or not _PORTS.fullmatch(str(parameters.get("port", ""))):
        raise MalformedDsn(
            "malformed dsn: the host or database contains '@', or the port is not a number; probably a special "
            "character of the password is not encoded"
        )
    return parameters


def secrets_of(parameters: dict[str, Any]) -> tuple[str, ...]:
    """Return the values of connection parameters that no message may contain, such as passwords."""
    return tuple(str(value) for name, value in parameters.items() if "password" in name and value)


def is_standby(conn: psycopg.Connection) -> bool:
    """Return True if Postgres is in recovery and therefore read-only."""
    with map_errors():
        return conn.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
