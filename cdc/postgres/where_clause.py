"""Predicates: conditions in the source's SQL by which people say which rows of a table are read again.

One may only say which. Whether it does more is asked of the server, which judges it by the volatility of what it
calls: to try it on rows would be to do what it does, and would show nothing where no row comes that far. A function
that is declared otherwise than it behaves is met by the reading, which is read-only and bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import sql

from cdc.errors import CdcError, ConfigError, Reaction, SourceError, SourceUnreachable
from cdc.postgres.sqlstate import classify
from cdc.table import TableSchema

PLANNED_WITHIN: Final = 10.0
"""Seconds that planning may take, which takes milliseconds: but what is constant is computed then."""
READ_WITHIN: Final = 3600.0
"""Seconds that one chunk may take to find its rows: a scan of some hundred GB. Its snapshot keeps the source from
cleaning up meanwhile, and of a table with many writers the window around so long a reading overflows anyway."""

_FITS: Final = "EXPLAIN SELECT FROM {} WHERE CASE WHEN {} THEN true END"
# the server merges a query in WITH into its outer one unless it is volatile or locks rows (the manual's section on
# WITH queries, "Common Table Expression Materialization")
_STEADY: Final = "EXPLAIN (FORMAT JSON) WITH _asked AS (SELECT FROM {} WHERE ({})) SELECT FROM _asked"
_VOLATILE: Final = "SELECT DISTINCT proname FROM pg_proc WHERE provolatile = 'v' AND proname = ANY(%s) ORDER BY proname"
_CALLED: Final = re.compile(r"(\w+)\"?\s*\(")
_READ_ONLY: Final = "(25006)"
_CANCELED: Final = "(57014)"
"""SQLSTATEs at the end of our messages; the server's own words may be of any language."""
_AS_WHERE: Final = "write it as it would stand behind WHERE at the source"
_TELLING: Final = (
    "use what is STABLE or IMMUTABLE, as now() for clock_timestamp(); a function of your own that only reads can be "
    "declared so: ALTER FUNCTION … STABLE"
)
_BRIEF: Final = "ask for less at once: a range of keys (--keys FROM..TO), or a condition that an index answers"


def check_predicate(
    conn: psycopg.Connection, schema: TableSchema, where: str, *, within: float = PLANNED_WITHIN
) -> None:
    """Raise ConfigError if a predicate cannot be planned over the table in so many seconds, or calls what is volatile.

    Nothing is run but what the planner computes beforehand. It stands between keywords here, where one that closes
    parentheses it did not open, or comments out what follows, does not parse: so it cannot get out of those around it
    later. Raises SourceUnreachable while somebody else has locked the table, or if the connection breaks.
    """
    table = sql.Identifier(schema.schema, schema.name)
    try:
        with conn.transaction():
            conn.execute("SET TRANSACTION READ ONLY")
            _bound(conn, "statement_timeout", within)
            _bound(conn, "lock_timeout", within / 2)  # who waits for a lock is told of it, and not of the predicate
            _explain(conn, sql.SQL(_FITS).format(table, sql.SQL(where)))  # type: ignore[arg-type]
            plan = _explain(conn, sql.SQL(_STEADY).format(table, sql.SQL(where)))  # type: ignore[arg-type]
            if plan[0]["Plan"].get("CTE Name") == "_asked":
                raise ConfigError(_refusal(schema, where, _volatile(conn, where)), remedy=_TELLING)
    except psycopg.Error as exc:
        raise _failure(exc, schema, where) from exc


@contextmanager
def bounded_read(
    conn: psycopg.Connection, schema: TableSchema, where: str | None, *, within: float = READ_WITHIN
) -> Iterator[None]:
    """Bound the statements of the block, in a read-only transaction, if they read by a predicate.

    Raises ConfigError in place of what the server says of one that writes, or that takes longer.
    """
    if where is None:
        yield
        return
    _bound(conn, "statement_timeout", within)
    try:
        yield
    except SourceError as exc:
        if exc.message.endswith(_READ_ONLY):
            said = "it writes where it is declared to read"
            raise ConfigError(_refusal(schema, where, said), remedy=_TELLING) from exc
        if exc.message.endswith(_CANCELED):
            said = f"a chunk was canceled, or took longer than {within:,g} seconds"
            raise ConfigError(_refusal(schema, where, said), remedy=_BRIEF) from exc
        raise


def _bound(conn: psycopg.Connection, name: str, seconds: float) -> None:
    conn.execute(sql.SQL("SET LOCAL {} = {}").format(sql.Identifier(name), sql.Literal(round(seconds * 1000))))


def _explain(conn: psycopg.Connection, query: sql.Composed) -> Any:
    # a result in binary comes by the extended protocol, which takes one statement and no second behind a semicolon
    row = conn.execute(query, prepare=False, binary=True).fetchone()
    return None if row is None else row[0]


def _volatile(conn: psycopg.Connection, where: str) -> str:
    named = [name.lower() for name in _CALLED.findall(where)]
    found = ", ".join(name for (name,) in conn.execute(_VOLATILE, [named]))
    why = f"it calls what is volatile: {found}" if found else "something in it is volatile or locks rows"
    return f"it may write, wait, or say something else each time, for {why}"


def _failure(exc: psycopg.Error, schema: TableSchema, where: str) -> CdcError:
    failure = classify(exc)
    if isinstance(exc, psycopg.errors.LockNotAvailable):
        return SourceUnreachable(f"{schema.topic!r} is locked by another session", remedy="ask again when it has ended")
    if isinstance(exc, psycopg.errors.QueryCanceled):
        return ConfigError(_refusal(schema, where, "it was not planned in time"), remedy=_BRIEF)
    if exc.sqlstate is None or failure.reaction is Reaction.RETRY:
        return failure
    said = (exc.diag.message_primary or str(exc)).lower()
    return ConfigError(_refusal(schema, where, said), remedy=_AS_WHERE)


def _refusal(schema: TableSchema, where: str, said: str) -> str:
    return f"the predicate {where!r} does not fit {schema.topic!r}: {said}"
