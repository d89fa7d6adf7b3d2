"""Checks of the rows that a person selects for a backfill: a list of keys, or a predicate in the source's SQL.

**Keys.** The text of a key may differ from what the server prints: `007` is the integer 7. A key has a row if the
server considers the two equal, in the column's type and collation.

**Predicates** must have no side effects. The server checks that by the volatility of the functions it calls.
Evaluating the predicate on rows would cause the side effects, and would prove nothing if no row reaches the function. A
read-only transaction with a time limit protects against functions with a wrong volatility declaration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import sql

from cdc.errors import CdcError, ConfigError, Reaction, SourceError, SourceUnreachable, UnknownRelation
from cdc.postgres.chunk_snapshot import row_filter
from cdc.postgres.copy import from_clause
from cdc.postgres.sqlstate import classify, map_errors
from cdc.table import TableSchema

Key = tuple[str, ...]

# with a modifier of -1 "bit" and bpchar keep their length, which `bit` and `character` do not
_TYPES: Final = """
    SELECT attname, format_type(atttypid, -1), format_type(atttypid, atttypmod) FROM pg_attribute
    WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
"""
_INVALID: Final = (psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError, UnicodeError)
"""Errors for a text that is invalid for its column's type or domain."""
PLANNED_WITHIN: Final = 10.0
"""Seconds that planning may take. It takes milliseconds, but the planner evaluates constant expressions."""
READ_WITHIN: Final = 3600.0
"""Seconds that reading one chunk may take: a scan of several hundred GB. The snapshot delays VACUUM at the source for
that time, and the watermark window of a busy table overflows in longer reads anyway."""
_PLAN: Final = "EXPLAIN SELECT FROM {} WHERE CASE WHEN {} THEN true END"
# the server merges a query in WITH into its outer one unless it is volatile or locks rows (the manual's section on
# WITH queries, "Common Table Expression Materialization")
_PLAN_IN_WITH: Final = "EXPLAIN (FORMAT JSON) WITH _selected AS (SELECT FROM {} WHERE ({})) SELECT FROM _selected"
_VOLATILE: Final = "SELECT DISTINCT proname FROM pg_proc WHERE provolatile = 'v' AND proname = ANY(%s) ORDER BY proname"
_CALLED: Final = re.compile(r"(\w+)\"?\s*\(")
_READ_ONLY: Final = "(25006)"
_CANCELED: Final = "(57014)"
"""SQLSTATEs at the end of messages; the server's text may be in any language."""
_WRITE_AS_WHERE: Final = "write the predicate as the source's SQL expects it after WHERE"
_USE_STABLE: Final = (
    "use STABLE or IMMUTABLE functions, for example now() instead of clock_timestamp(); declare your own function that "
    "only reads: ALTER FUNCTION … STABLE"
)
_SELECT_FEWER: Final = "select fewer rows: a range of keys (--keys FROM..TO), or a condition that an index supports"


def check_keys(conn: psycopg.Connection, schema: TableSchema, keys: Sequence[Key]) -> None:
    """Raise ConfigError, which names the key, if a key is invalid for the table's key columns; reads no rows."""
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
    """Distinct keys without a row that the publication sends, in the text form of the stream."""
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
    """Keys of one table as an SQL query."""

    def __init__(self, conn: psycopg.Connection, schema: TableSchema) -> None:
        self._conn = conn
        types = {name: (bare, whole) for name, bare, whole in conn.execute(_TYPES, [schema.oid])}
        if missing := [column.name for column in schema.key if column.name not in types]:
            raise UnknownRelation(f"table {schema.topic!r} no longer has the key column {missing[0]!r}")
        self._types = [types[column.name] for column in schema.key]

    def query(self, keys: Sequence[Key]) -> sql.Composed:
        """SELECT of each value in its column's type without modifier, with modifier, and whether the two are equal."""
        places = range(len(self._types))
        arrays = sql.SQL(", ").join(
            sql.SQL("{}::text[]").format(sql.Literal([key[place] for key in keys])) for place in places
        )
        names = sql.SQL(", ").join(sql.Identifier(f"t{place}") for place in places)
        bare = sql.SQL(", ").join(self._cast(place, 0, f"k{place}") for place in places)
        whole = sql.SQL(", ").join(self._cast(place, 1, f"m{place}") for place in places)
        values = sql.SQL("SELECT {}, {} FROM unnest({}) AS _texts ({})").format(bare, whole, arrays, names)
        same = sql.SQL(", ").join(
            sql.SQL("{} = {}").format(sql.Identifier(f"k{place}"), sql.Identifier(f"m{place}")) for place in places
        )
        return sql.SQL("SELECT _listed.*, {} FROM ({}) AS _listed").format(same, values)

    def error(self, keys: Sequence[Key]) -> str | None:
        """The server's error message for one of the keys; None if all are valid."""
        try:
            with self._conn.transaction():
                self._conn.execute("SET TRANSACTION READ ONLY")
                _texts(self._conn, self.query(keys))
        except _INVALID as exc:
            diag = exc.diag.message_primary if isinstance(exc, psycopg.Error) else None
            return (diag or str(exc)).lower()
        return None

    def _cast(self, place: int, kind: int, name: str) -> sql.Composed:
        # format_type quotes the name of a type where necessary
        return sql.SQL("CAST({} AS {}) AS {}").format(
            sql.Identifier(f"t{place}"), sql.SQL(self._types[place][kind]), sql.Identifier(name)
        )


def _texts(conn: psycopg.Connection, query: sql.Composed) -> list[list[str]]:
    """The rows in the form of their types' output functions, which can differ from a cast to text."""
    result = conn.execute(query, prepare=False).pgresult
    assert result is not None  # noqa: S101 - it was executed
    fields = range(result.nfields)
    return [[(result.get_value(row, n) or b"").decode() for n in fields] for row in range(result.ntuples)]


def _as_printed(value: Sequence[str]) -> str:
    """The value with the column's modifier if that does not change it; otherwise the value without it."""
    bare, whole, same = value
    return whole if same == "t" else bare


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
            _limit(conn, "statement_timeout", within)
            _limit(conn, "lock_timeout", within / 2)  # so that a lock is reported as such, not as a slow predicate
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
    """Limit the time of the block's statements, in a read-only transaction, if there is a predicate.

    Raises ConfigError instead of the server's error for a predicate that writes or takes longer.
    """
    if where is None:
        yield
        return
    _limit(conn, "statement_timeout", within)
    try:
        yield
    except SourceError as exc:
        if exc.message.endswith(_READ_ONLY):
            reason = "the predicate calls a function that is declared read-only but writes"
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
    return f"the predicate could write, wait, or give another result each time, because {reason}"


def _failure(exc: psycopg.Error, schema: TableSchema, where: str) -> CdcError:
    failure = classify(exc)
    if isinstance(exc, psycopg.errors.LockNotAvailable):
        return SourceUnreachable(
            f"table {schema.topic!r} cannot be read: another session has locked it",
            remedy="run the command again after the other session has ended",
        )
    if isinstance(exc, psycopg.errors.QueryCanceled):
        return ConfigError(_refusal(schema, where, "planning the predicate took too long"), remedy=_SELECT_FEWER)
    if exc.sqlstate is None or failure.reaction is Reaction.RETRY:
        return failure
    reason = (exc.diag.message_primary or str(exc)).lower()
    return ConfigError(_refusal(schema, where, reason), remedy=_WRITE_AS_WHERE)


def _refusal(schema: TableSchema, where: str, reason: str) -> str:
    return f"invalid predicate {where!r} for table {schema.topic!r}: {reason}"
