"""Key lists and SQL conditions that select the rows of a backfill: their validation, and queries that use them.

**Keys.** The text of a key may differ from what Postgres prints: `007` is the integer 7. A key selects a row if
Postgres considers it equal to the row's key, in the column's type and collation.

**Conditions** must have no side effects. So a condition that calls a volatile function is refused; Postgres finds the
function when it plans the condition. A trial run of the condition is no alternative: it would cause the side effects,
and it would miss a function that Postgres evaluates for none of the present rows. A function may be declared STABLE
although it writes. Therefore chunks are read in a read-only transaction with a time limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import sql

from cdc.errors import CdcError, ConfigError, Reaction, SourceError, SourceUnreachable, UnknownRelation
from cdc.postgres.chunk_queries import row_filter, typed_literal
from cdc.postgres.copy_in_snapshot import from_clause
from cdc.postgres.sqlstate import classify, map_errors
from cdc.table import TableSchema

Key = tuple[str, ...]

# for the modifier -1 format_type prints `"bit"` and `bpchar`: their values keep their length, while `bit` and
# `character` mean length 1
_TYPES: Final = """
    SELECT attname, format_type(atttypid, -1), format_type(atttypid, atttypmod) FROM pg_attribute
    WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
"""
_INVALID: Final = (psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError, UnicodeError)
"""Exceptions of psycopg for a text that is invalid for its column's type or domain."""
PLANNED_WITHIN: Final = 10.0
"""Maximum seconds for planning a condition.

Planning takes milliseconds, but the planner also evaluates constant expressions, which can take any time.
"""
READ_WITHIN: Final = 3600.0
"""Maximum seconds for reading one chunk with a condition; enough to scan several hundred GB.

The snapshot of the chunk delays VACUUM at the source. A longer read of a busy table would fail anyway, because its
watermark window would contain more changes than the reader keeps in memory.
"""
_PLAN: Final = "EXPLAIN SELECT FROM {} WHERE CASE WHEN {} THEN true END"
# the server merges a query in WITH into its outer one unless it is volatile or locks rows (the manual's section on
# WITH queries, "Common Table Expression Materialization")
_PLAN_IN_WITH: Final = "EXPLAIN (FORMAT JSON) WITH _selected AS (SELECT FROM {} WHERE ({})) SELECT FROM _selected"
_VOLATILE: Final = "SELECT DISTINCT proname FROM pg_proc WHERE provolatile = 'v' AND proname = ANY(%s) ORDER BY proname"
_CALLED: Final = re.compile(r"(\w+)\"?\s*\(")
_READ_ONLY: Final = "(25006)"
_CANCELED: Final = "(57014)"
"""SQLSTATE at the end of the error message of a canceled statement; `_READ_ONLY` is that of a refused write.

Errors are identified by this SQLSTATE, because the text before it may be in any language.
"""
_WRITE_AS_WHERE: Final = "write the condition in the SQL of the source, without the word WHERE"
_USE_STABLE: Final = (
    "use STABLE or IMMUTABLE functions, for example now() instead of clock_timestamp(); if your own function only "
    "reads, declare it STABLE: ALTER FUNCTION … STABLE"
)
_SELECT_FEWER: Final = "select fewer rows: a range of keys (--keys FROM..TO), or a condition that an index supports"


def check_keys(conn: psycopg.Connection, schema: TableSchema, keys: Sequence[Key]) -> None:
    """Raise ConfigError, with the key in its message, if a key is invalid for the table's key columns.

    The check reads no rows.
    """
    with map_errors():
        key_list = _KeyList(conn, schema)
        reason = key_list.error(keys)
        while reason is not None and len(keys) > 1:
            half, rest = keys[: len(keys) // 2], keys[len(keys) // 2 :]
            half_reason = key_list.error(half)
            keys, reason = (rest, key_list.error(rest)) if half_reason is None else (half, half_reason)
    if reason is not None:
        shown = ",".join(keys[0]).encode(errors="replace").decode()
        raise ConfigError(
            f"invalid key {shown!r} of table {schema.topic!r}: {reason}",
            remedy="write the values of the key columns as the source prints them, separated by commas",
        )


def missing_keys(conn: psycopg.Connection, schema: TableSchema, keys: Sequence[Key], publication: str) -> list[Key]:
    """Return the given keys for which the source has no row that the publication sends.

    The result contains each key once, in the text form that the stream would use for it.
    """
    with map_errors():
        equal = [
            sql.SQL("{} = {}").format(sql.Identifier(column.name), sql.Identifier("_listed", f"k{place}"))
            for place, column in enumerate(schema.key)
        ]
        conditions = sql.SQL(" AND ").join([*equal, *row_filter(conn, schema, publication)])
        query = sql.SQL("{} WHERE NOT EXISTS (SELECT FROM {} AS _stored WHERE {})").format(
            _KeyList(conn, schema).query(keys), from_clause(conn, schema), conditions
        )
        found = _texts(conn, query)
    width = len(schema.key)
    return list(dict.fromkeys(tuple(_as_printed(row[place::width]) for place in range(width)) for row in found))


class _KeyList:
    """Builds and runs SQL queries over a list of keys of one table."""

    def __init__(self, conn: psycopg.Connection, schema: TableSchema) -> None:
        self._conn = conn
        types = {name: (bare, whole) for name, bare, whole in conn.execute(_TYPES, [schema.oid])}
        if missing := [column.name for column in schema.key if column.name not in types]:
            raise UnknownRelation(f"table {schema.topic!r} no longer has the key column {missing[0]!r}")
        self._types = [types[column.name] for column in schema.key]

    def query(self, keys: Sequence[Key]) -> sql.Composed:
        """Return a SELECT with one row per key and three result columns per key column.

        First come all values of their types without type modifier, then all values cast to the type modifier. The last
        result columns are true where the two are equal. The values are typed literals, which the input function of the
        type reads: a cast of a text can have a function of its own, for example that to regclass.
        """
        places = range(len(self._types))
        rows = sql.SQL(", ").join(
            sql.SQL("({})").format(sql.SQL(", ").join(map(typed_literal, key, (bare for bare, _ in self._types))))
            for key in keys
        )
        names = sql.SQL(", ").join(sql.Identifier(f"k{place}") for place in places)
        whole = sql.SQL(", ").join(
            sql.SQL("CAST({} AS {}) AS {}").format(
                sql.Identifier(f"k{place}"), sql.SQL(self._types[place][1]), sql.Identifier(f"m{place}")
            )
            for place in places
        )
        values = sql.SQL("SELECT {}, {} FROM (VALUES {}) AS _literals ({})").format(names, whole, rows, names)
        same = sql.SQL(", ").join(
            sql.SQL("{} = {}").format(sql.Identifier(f"k{place}"), sql.Identifier(f"m{place}")) for place in places
        )
        return sql.SQL("SELECT _listed.*, {} FROM ({}) AS _listed").format(same, values)

    def error(self, keys: Sequence[Key]) -> str | None:
        """Return the error message of Postgres if one of the keys is invalid; None if all keys are valid."""
        try:
            with self._conn.transaction():
                self._conn.execute("SET TRANSACTION READ ONLY")
                _texts(self._conn, self.query(keys))
        except _INVALID as exc:
            diag = exc.diag.message_primary if isinstance(exc, psycopg.Error) else None
            return (diag or str(exc)).lower()
        return None


def _texts(conn: psycopg.Connection, query: sql.Composed) -> list[list[str]]:
    """Run a query, and return its rows; each value is the text that the output function of its type prints.

    This text can differ from a cast to text.
    """
    result = conn.execute(query, prepare=False).pgresult
    assert result is not None  # noqa: S101 - it was executed
    fields = range(result.nfields)
    return [[(result.get_value(row, n) or b"").decode() for n in fields] for row in range(result.ntuples)]


def _as_printed(value: Sequence[str]) -> str:
    """Return the text with which Postgres prints one key value.

    `value` contains the value cast without type modifier, the value cast with type modifier, and `t` if both are equal.
    If they are equal, the result is the cast with modifier; otherwise it is the cast without modifier.
    """
    bare, whole, same = value
    return whole if same == "t" else bare


def check_predicate(
    conn: psycopg.Connection, schema: TableSchema, where: str, *, within: float = PLANNED_WITHIN
) -> None:
    """Raise ConfigError if the condition is invalid, volatile, or not planned within `within` seconds.

    Postgres only plans the condition and evaluates constant expressions. In the planned query the condition has no
    parentheses around it, so an unbalanced parenthesis in it is a syntax error, and so is a comment that hides the
    following text. A condition that passes cannot end the parentheses of later queries. Raises SourceUnreachable while
    another session has locked the table, or if the connection breaks.
    """
    table = sql.Identifier(schema.schema, schema.name)
    try:
        with conn.transaction():
            conn.execute("SET TRANSACTION READ ONLY")
            _limit(conn, "statement_timeout", within)
            _limit(conn, "lock_timeout", within / 2)  # so that a lock is reported as such, not as a slow condition
            _explain(conn, sql.SQL(_PLAN).format(table, sql.SQL(where)))  # type: ignore[arg-type]
            plan = _explain(conn, sql.SQL(_PLAN_IN_WITH).format(table, sql.SQL(where)))  # type: ignore[arg-type]
            if plan[0]["Plan"].get("CTE Name") == "_selected":
                raise ConfigError(_refusal(schema, where, _volatile(conn, where)), remedy=_USE_STABLE)
    except psycopg.Error as exc:
        raise _failure(exc, schema, where) from exc


@contextmanager
def bounded_read(
    conn: psycopg.Connection, schema: TableSchema, where: str | None, *, within: float = READ_WITHIN
) -> Iterator[None]:
    """If `where` is a condition, limit each statement in the block to `within` seconds; if it is None, do nothing.

    The caller has opened a read-only transaction. If the condition writes or takes longer, the block raises ConfigError
    in place of the error of Postgres.
    """
    if where is None:
        yield
        return
    _limit(conn, "statement_timeout", within)
    try:
        yield
    except SourceError as exc:
        if exc.message.endswith(_READ_ONLY):
            reason = "the condition calls a function that is declared STABLE or IMMUTABLE but writes"
            raise ConfigError(_refusal(schema, where, reason), remedy=_USE_STABLE) from exc
        if exc.message.endswith(_CANCELED):
            reason = f"reading a chunk was canceled, or took longer than {within:,g} seconds"
            raise ConfigError(_refusal(schema, where, reason), remedy=_SELECT_FEWER) from exc
        raise


def _limit(conn: psycopg.Connection, name: str, seconds: float) -> None:
    conn.execute(sql.SQL("SET LOCAL {} = {}").format(sql.Identifier(name), sql.Literal(round(seconds * 1000))))


def _explain(conn: psycopg.Connection, query: sql.Composed) -> Any:
    # binary results use the extended protocol, which rejects a second statement after a semicolon
    row = conn.execute(query, prepare=False, binary=True).fetchone()
    return None if row is None else row[0]


def _volatile(conn: psycopg.Connection, where: str) -> str:
    named = [name.lower() for name in _CALLED.findall(where)]
    found = ", ".join(name for (name,) in conn.execute(_VOLATILE, [named]))
    reason = f"it calls the volatile functions {found}" if found else "it contains a volatile expression or locks rows"
    return f"{reason}, so it could write, wait, or return a different result for each call"


def _failure(exc: psycopg.Error, schema: TableSchema, where: str) -> CdcError:
    failure = classify(exc)
    if isinstance(exc, psycopg.errors.LockNotAvailable):
        return SourceUnreachable(
            f"table {schema.topic!r} cannot be read: another session has locked it",
            remedy="run the command again after the other session has ended",
        )
    if isinstance(exc, psycopg.errors.QueryCanceled):
        return ConfigError(_refusal(schema, where, "planning the condition took too long"), remedy=_SELECT_FEWER)
    if exc.sqlstate is None or failure.reaction is Reaction.RETRY:
        return failure
    reason = (exc.diag.message_primary or str(exc)).lower()
    return ConfigError(_refusal(schema, where, reason), remedy=_WRITE_AS_WHERE)


def _refusal(schema: TableSchema, where: str, reason: str) -> str:
    return f"invalid condition {where!r} for table {schema.topic!r}: {reason}"
