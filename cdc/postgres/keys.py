"""Checks of a list of keys at the source: whether they are valid keys of the table, and which have no row.

A person writes the list, so a text may differ from what the server prints: `007` is the integer 7. A key has a row if
the server considers the two equal, in the column's type and collation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import psycopg
from psycopg import sql

from cdc.errors import ConfigError, UnknownRelation
from cdc.postgres.chunk_snapshot import row_filter
from cdc.postgres.copy import from_clause
from cdc.postgres.sqlstate import map_errors
from cdc.table import TableSchema

Key = tuple[str, ...]

# with a modifier of -1 "bit" and bpchar keep their length, which `bit` and `character` do not
_TYPES: Final = """
    SELECT attname, format_type(atttypid, -1), format_type(atttypid, atttypmod) FROM pg_attribute
    WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
"""
_WRONG: Final = (psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError, UnicodeError)
"""Errors for a text that is invalid for its column's type or domain."""


def check_keys(conn: psycopg.Connection, schema: TableSchema, keys: Sequence[Key]) -> None:
    """Raise ConfigError, which names the key, if a key is invalid for the table's key columns; reads no rows."""
    with map_errors():
        listed = _Listed(conn, schema)
        said = listed.refusal(keys)
        while said is not None and len(keys) > 1:
            half, rest = keys[: len(keys) // 2], keys[len(keys) // 2 :]
            of_half = listed.refusal(half)
            keys, said = (rest, listed.refusal(rest)) if of_half is None else (half, of_half)
    if said is not None:
        shown = ",".join(keys[0]).encode(errors="replace").decode()
        raise ConfigError(
            f"invalid key {shown!r} of {schema.topic!r}: {said}",
            remedy="write the values of the key columns as the source prints them, separated by commas",
        )


def missing_keys(conn: psycopg.Connection, schema: TableSchema, keys: Sequence[Key], publication: str) -> list[Key]:
    """Distinct keys without a row that the publication sends, in the text form of the stream."""
    with map_errors():
        equal = [
            sql.SQL("{} = {}").format(sql.Identifier(column.name), sql.Identifier("_asked", f"k{place}"))
            for place, column in enumerate(schema.key)
        ]
        held = sql.SQL(" AND ").join([*equal, *row_filter(conn, schema, publication)])
        query = sql.SQL("{} WHERE NOT EXISTS (SELECT FROM {} AS _held WHERE {})").format(
            _Listed(conn, schema).query(keys), from_clause(conn, schema), held
        )
        found = _texts(conn, query)
    width = len(schema.key)
    return list(dict.fromkeys(tuple(_as_shown(row[place::width]) for place in range(width)) for row in found))


class _Listed:
    """Keys of one table as an SQL query."""

    def __init__(self, conn: psycopg.Connection, schema: TableSchema) -> None:
        self._conn = conn
        types = {name: (bare, whole) for name, bare, whole in conn.execute(_TYPES, [schema.oid])}
        if missing := [column.name for column in schema.key if column.name not in types]:
            raise UnknownRelation(f"{schema.topic!r} no longer has the column {missing[0]!r}")
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
        asked = sql.SQL("SELECT {}, {} FROM unnest({}) AS _texts ({})").format(bare, whole, arrays, names)
        same = sql.SQL(", ").join(
            sql.SQL("{} = {}").format(sql.Identifier(f"k{place}"), sql.Identifier(f"m{place}")) for place in places
        )
        return sql.SQL("SELECT _asked.*, {} FROM ({}) AS _asked").format(same, asked)

    def refusal(self, keys: Sequence[Key]) -> str | None:
        """The server's error message for one of the keys; None if all are valid."""
        try:
            with self._conn.transaction():
                self._conn.execute("SET TRANSACTION READ ONLY")
                _texts(self._conn, self.query(keys))
        except _WRONG as exc:
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


def _as_shown(value: Sequence[str]) -> str:
    """The value with the column's modifier if that does not change it; otherwise the value as it was given."""
    bare, whole, same = value
    return whole if same == "t" else bare
