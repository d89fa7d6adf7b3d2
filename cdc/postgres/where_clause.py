"""Checks of predicates: conditions in the source's SQL that select the rows of a backfill.

A predicate must have no side effects. The server checks that by the volatility of the functions it calls. Evaluating
the predicate on rows would cause the side effects, and would prove nothing if no row reaches the function. A read-only
transaction with a time limit protects against functions with a wrong volatility declaration.
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
"""Seconds that planning may take. It takes milliseconds, but the planner evaluates constant expressions."""
READ_WITHIN: Final = 3600.0
"""Seconds that reading one chunk may take: a scan of several hundred GB. The snapshot delays VACUUM at the source for
that time, and the watermark window of a busy table overflows in longer reads anyway."""

_FITS: Final = "EXPLAIN SELECT FROM {} WHERE CASE WHEN {} THEN true END"
# the server merges a query in WITH into its outer one unless it is volatile or locks rows (the manual's section on
# WITH queries, "Common Table Expression Materialization")
_STEADY: Final = "EXPLAIN (FORMAT JSON) WITH _asked AS (SELECT FROM {} WHERE ({})) SELECT FROM _asked"
_VOLATILE: Final = "SELECT DISTINCT proname FROM pg_proc WHERE provolatile = 'v' AND proname = ANY(%s) ORDER BY proname"
_CALLED: Final = re.compile(r"(\w+)\"?\s*\(")
_READ_ONLY: Final = "(25006)"
_CANCELED: Final = "(57014)"
"""SQLSTATEs at the end of messages; the server's text may be in any language."""
_AS_WHERE: Final = "write it as after WHERE in SQL of the source"
_TELLING: Final = (
    "use STABLE or IMMUTABLE functions, for example now() instead of clock_timestamp(); declare your own function that "
    "only reads: ALTER FUNCTION … STABLE"
)
_BRIEF: Final = "select fewer rows: a range of keys (--keys FROM..TO), or a condition that an index supports"


def check_predicate(
    conn: psycopg.Connection, schema: TableSchema, where: str, *, within: float = PLANNED_WITHIN
) -> None:
    """Raise ConfigError if planning the predicate fails or takes more than `within` seconds, or if it is volatile.

    Runs nothing but the planner's constant folding. The predicate is parsed between keywords, where unbalanced
    parentheses and comments that hide the following text are syntax errors, so it cannot escape from parentheses in
    later queries. Raises SourceUnreachable while another session has locked the table, or if the connection breaks.
    """
    table = sql.Identifier(schema.schema, schema.name)
    try:
        with conn.transaction():
            conn.execute("SET TRANSACTION READ ONLY")
            _bound(conn, "statement_timeout", within)
            _bound(conn, "lock_timeout", within / 2)  # so that a lock is reported as such, not as a slow predicate
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
    """Limit the time of the block's statements, in a read-only transaction, if there is a predicate.

    Raises ConfigError instead of the server's error for a predicate that writes or takes longer.
    """
    if where is None:
        yield
        return
    _bound(conn, "statement_timeout", within)
    try:
        yield
    except SourceError as exc:
        if exc.message.endswith(_READ_ONLY):
            said = "it calls a function that writes although it is declared to only read"
            raise ConfigError(_refusal(schema, where, said), remedy=_TELLING) from exc
        if exc.message.endswith(_CANCELED):
            said = f"a chunk was canceled, or took longer than {within:,g} seconds"
            raise ConfigError(_refusal(schema, where, said), remedy=_BRIEF) from exc
        raise


def _bound(conn: psycopg.Connection, name: str, seconds: float) -> None:
    conn.execute(sql.SQL("SET LOCAL {} = {}").format(sql.Identifier(name), sql.Literal(round(seconds * 1000))))


def _explain(conn: psycopg.Connection, query: sql.Composed) -> Any:
    # binary results use the extended protocol, which rejects a second statement after a semicolon
    row = conn.execute(query, prepare=False, binary=True).fetchone()
    return None if row is None else row[0]


def _volatile(conn: psycopg.Connection, where: str) -> str:
    named = [name.lower() for name in _CALLED.findall(where)]
    found = ", ".join(name for (name,) in conn.execute(_VOLATILE, [named]))
    reason = f"it calls volatile functions: {found}" if found else "it contains a volatile expression or locks rows"
    return f"it could write, wait, or give another result each time, because {reason}"


def _failure(exc: psycopg.Error, schema: TableSchema, where: str) -> CdcError:
    failure = classify(exc)
    if isinstance(exc, psycopg.errors.LockNotAvailable):
        return SourceUnreachable(
            f"{schema.topic!r} is locked by another session", remedy="run the command again when that session has ended"
        )
    if isinstance(exc, psycopg.errors.QueryCanceled):
        return ConfigError(_refusal(schema, where, "planning took too long"), remedy=_BRIEF)
    if exc.sqlstate is None or failure.reaction is Reaction.RETRY:
        return failure
    said = (exc.diag.message_primary or str(exc)).lower()
    return ConfigError(_refusal(schema, where, said), remedy=_AS_WHERE)


def _refusal(schema: TableSchema, where: str, said: str) -> str:
    return f"invalid predicate {where!r} for {schema.topic!r}: {said}"
