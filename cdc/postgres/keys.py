"""Keys: listed keys of a table as its own server reads them: whether they can be keys of it, and which have no row.

Somebody wrote them, so their text need not be the one that the server prints: `007` is the integer 7. A key has a row
if the server takes the two for equal, in the column's type and collation.
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
"""What a text raises that its column's type, or a domain's check, does not take."""


def check_keys(conn: psycopg.Connection, schema: TableSchema, keys: Sequence[Key]) -> None:
    """Raise ConfigError if a key is none that the table can have, naming the first found; reads nothing of it."""
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
            f"the key {shown!r} does not fit {schema.topic!r}: {said}",
            remedy="write its columns' values as the source prints them, with commas between them",
        )


def missing_keys(conn: psycopg.Connection, schema: TableSchema, keys: Sequence[Key], publication: str) -> list[Key]:
    """Keys that no row has which the publication sends, each once, in the text in which the stream would show them."""
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
    """Keys of one table as rows of a query."""

    def __init__(self, conn: psycopg.Connection, schema: TableSchema) -> None:
        self._conn = conn
        types = {name: (bare, whole) for name, bare, whole in conn.execute(_TYPES, [schema.oid])}
        if lacking := [column.name for column in schema.key if column.name not in types]:
            raise UnknownRelation(f"{schema.topic!r} has no column {lacking[0]!r} any more")
        self._types = [types[column.name] for column in schema.key]

    def query(self, keys: Sequence[Key]) -> sql.Composed:
        """SELECT of each value in its column's type without modifier, then with it, then whether the two are equal."""
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
        """What the server says against one of the keys; None if nothing."""
        try:
            with self._conn.transaction():
                self._conn.execute("SET TRANSACTION READ ONLY")
                _texts(self._conn, self.query(keys))
        except _WRONG as exc:
            diag = exc.diag.message_primary if isinstance(exc, psycopg.Error) else None
            return (diag or str(exc)).lower()
        return None

    def _cast(self, place: int, kind: int, name: str) -> sql.Composed:
        # the name of a type, as format_type writes it, is quoted where it has to be
        return sql.SQL("CAST({} AS {}) AS {}").format(
            sql.Identifier(f"t{place}"), sql.SQL(self._types[place][kind]), sql.Identifier(name)
        )


def _texts(conn: psycopg.Connection, query: sql.Composed) -> list[list[str]]:
    """The rows as their types print them, which a cast to text does not always do."""
    result = conn.execute(query, prepare=False).pgresult
    assert result is not None  # noqa: S101 - it was executed
    fields = range(result.nfields)
    return [[(result.get_value(row, n) or b"").decode() for n in fields] for row in range(result.ntuples)]


def _as_shown(value: Sequence[str]) -> str:
    """As a column shows it that can hold it; one that cannot has it nowhere, then as it was asked for."""
    bare, whole, same = value
    return whole if same == "t" else bare
