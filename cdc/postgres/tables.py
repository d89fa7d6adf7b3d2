"""Tables of the source: pattern matching, and table schemas from system catalogs and Relation messages.

pgoutput sends no attribute numbers. The system catalogs of Postgres contain the current state, but the stream may be
behind. So `column_identity` compares a Relation message with the system catalogs and the previous schema. If it cannot
prove which columns are the same, the schema is marked NEEDS_RESYNC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import psycopg
from psycopg import sql

from cdc.lsn import Lsn
from cdc.pgoutput.messages import Relation
from cdc.position import Position
from cdc.postgres.column_identity import identify_columns
from cdc.postgres.connection import connect
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.system_catalog import CatalogTable, read_catalog_tables, read_types
from cdc.postgres.unreplicated_changes import CatalogState, read_catalog_states
from cdc.postgres.visibility import Visibility
from cdc.table import TableSchema, matches, topic

# partitions are published under their root's name; unlogged and temporary tables write no WAL
_TABLES: Final = """
    SELECT c.oid, n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
    AND n.nspname NOT IN ('information_schema', 'cdc_source') AND n.nspname !~ '^pg_'
    ORDER BY n.nspname, c.relname
"""
# temporary tables of sessions are ignored
_UNCAPTURABLE: Final = """
    SELECT c.oid, n.nspname, c.relname, c.relkind::text, rn.nspname, r.relname
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_class r ON c.relispartition AND r.oid = pg_partition_root(c.oid)
    LEFT JOIN pg_namespace rn ON rn.oid = r.relnamespace
    WHERE (c.relkind = 'f' OR c.relkind IN ('r', 'p') AND (c.relpersistence = 'u' OR c.relispartition))
    AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
    ORDER BY n.nspname, c.relname
"""
_READABLE: Final = """
    SELECT oid FROM pg_class WHERE oid = ANY(%(oids)s) AND has_schema_privilege(relnamespace, 'USAGE')
    AND has_table_privilege(oid, 'SELECT') AND NOT row_security_active(oid)
"""
_INSERTED: Final = """
    SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END::text,
           pg_current_snapshot()::text
"""


@dataclass(frozen=True, slots=True)
class CatalogView:
    """Definitions and states of tables, read from the system catalogs of Postgres at one time."""

    upto: Lsn
    """End of the WAL when the view was read."""
    visibility: Visibility
    """Transactions that the view shows; the WAL before `upto` may contain others, whose commit is not visible yet."""
    tables: Mapping[int, CatalogTable]
    """Definition of each table, by OID."""
    states: Mapping[int, CatalogState]
    """State of each table, by OID, to find changes missing in the stream (see `unreplicated_changes`)."""

    def shows(self, position: Position, xid: int) -> bool:
        """Return True if the view is at least as new as a transaction of the stream."""
        return position.lsn <= self.upto and bool(self.visibility.sees(np.array([xid])).all())

    def is_partition(self, oid: int) -> bool:
        """Return True if the table is a partition of another table."""
        root = self.tables[oid].root if oid in self.tables else None
        return root is not None and root != oid


class TableName(NamedTuple):
    """Schema and name of a table, unquoted."""

    schema: str
    name: str

    def __str__(self) -> str:
        return topic(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class UncapturableTable:
    """A table that a pattern of the definition matches but that cannot be captured."""

    oid: int
    name: TableName
    reason: str
    sql: str | None
    """SQL that makes the table capturable; None if SQL cannot do so."""


def uncapturable_tables(
    conn: psycopg.Connection, patterns: Sequence[str], exclude: Sequence[str] = ()
) -> list[UncapturableTable]:
    """Return the tables that match a pattern and no exclusion, but that cannot be captured.

    These are unlogged and foreign tables, and partitions. A partition is left out if a pattern or an exclusion matches
    its root.
    """
    with map_errors():
        found = conn.execute(_UNCAPTURABLE).fetchall()
    refused = []
    for oid, schema, name, kind, *root in found:
        table = TableName(schema, name)
        if not matches(str(table), patterns) or matches(str(table), exclude):
            continue
        if root[0] is None:
            refused.append(UncapturableTable(oid, table, *_uncapturable(table, kind)))
        elif not matches(over := str(TableName(*root)), [*patterns, *exclude]):
            refused.append(
                UncapturableTable(oid, table, f"is a partition of {over}: add the partitioned table to 'tables'", None)
            )
    return refused


def _uncapturable(table: TableName, kind: str) -> tuple[str, str | None]:
    if kind == "f":
        return "is a foreign table: its changes are not in the WAL of this server", None
    statement = sql.SQL("ALTER TABLE {} SET LOGGED;").format(sql.Identifier(*table))
    return "is unlogged: its changes are not in the WAL", statement.as_string(None)


def match_tables(
    conn: psycopg.Connection, patterns: Sequence[str], exclude: Sequence[str] = ()
) -> list[tuple[int, TableName]]:
    """Return OID and name of the tables that match a pattern and no exclusion, sorted by name.

    Only ordinary and partitioned tables are considered, no partitions. Patterns are case-sensitive globs over the
    topic, `schema.table`.
    """
    with map_errors():
        found = [(row[0], TableName(row[1], row[2])) for row in conn.execute(_TABLES)]
    return [(oid, table) for oid, table in found if matches(str(table), patterns) and not matches(str(table), exclude)]


def readable_tables(conn: psycopg.Connection, tables: Sequence[tuple[int, TableName]]) -> list[tuple[int, TableName]]:
    """Return those of the tables whose rows the role may read: all rows, through the schema, with SELECT."""
    with map_errors():
        readable = {oid for (oid,) in conn.execute(_READABLE, {"oids": [oid for oid, _ in tables]})}
    return [(oid, name) for oid, name in tables if oid in readable]


def matched_schemas(dsn: str, patterns: Sequence[str], exclude: Sequence[str] = ()) -> list[TableSchema]:
    """Return the schemas of the tables that match a pattern and no exclusion, sorted by name."""
    with connect(dsn, application_name="cdc tables") as conn:
        oids = [oid for oid, _ in match_tables(conn, patterns, exclude)]
        with map_errors():
            found = read_schemas(conn, oids)
    return [found[oid] for oid in oids if oid in found]


def read_schema(
    conn: psycopg.Connection, oid: int, *, relation: int | None = None, publication: str | None = None
) -> TableSchema | None:
    """Read the schema of a table, with attribute numbers as column ids; None if the table does not exist.

    `relation` is the log's number of the table. Its default is the OID, which is the number in the first epoch. If
    `publication` is given, the schema records the publication's current state, so that a later comparison can detect a
    change of the publication.
    """
    schema = read_schemas(conn, [oid], publication=publication).get(oid)
    return schema if schema is None or relation is None else replace(schema, relation=relation)


def read_schemas(
    conn: psycopg.Connection, oids: Sequence[int], *, publication: str | None = None
) -> dict[int, TableSchema]:
    """Return the schemas of several tables, by OID, with the OID as relation; dropped tables are left out."""
    seen = read_catalog_view(conn, oids, publication)
    return {
        oid: replace(table_schema(seen.tables[oid], oid, oid), standing=seen.states[oid].fingerprint)
        for oid in oids
        if oid in seen.tables and oid in seen.states
    }


def table_schema(now: CatalogTable, oid: int, relation: int) -> TableSchema:
    """Return the schema of a table in the system catalogs, with attribute numbers as column ids."""
    places = {number: ordinal for ordinal, number in enumerate(now.key)}
    return TableSchema(
        relation=relation,
        oid=oid,
        schema=now.schema,
        name=now.name,
        replica_identity=now.replica_identity,
        columns=tuple(a.column(a.number, places.get(a.number)) for a in now.live),
        root=now.root,
        witness=now.witness,
    )


def read_catalog_view(conn: psycopg.Connection, oids: Sequence[int], publication: str | None) -> CatalogView:
    """Read definitions and states of tables from the system catalogs of Postgres."""
    with map_errors():
        row = conn.execute(_INSERTED).fetchone()
        tables = read_catalog_tables(conn, oids)
    assert row is not None  # noqa: S101 - a SELECT without FROM has one row
    return CatalogView(
        Lsn.parse(row[0]), Visibility.parse(row[1]), tables, read_catalog_states(conn, oids, publication)
    )


def resolve_relation(
    conn: psycopg.Connection,
    message: Relation,
    known: TableSchema | None,
    epoch: int = 0,
    seen: CatalogView | None = None,
) -> TableSchema:
    """Return the schema version that a Relation message announces, with the column ids of the log.

    `known` is the previous version, None for a new table. `epoch` is part of the relation number of a new table. `seen`
    is a view of the system catalogs that contains the table; if it is None, this function reads one. If the system
    catalogs and `known` do not prove a column's id, the column gets an id that no attribute can have. The version is
    then flagged NEEDS_RESYNC with the reason.
    """
    now = (seen or read_catalog_view(conn, [message.oid], None)).tables.get(message.oid)
    facts = {a.type_oid: a.type for a in now.live if a.type is not None} if now else {}
    if unknown_types := [column.type_oid for column in message.columns if column.type_oid not in facts]:
        with map_errors():
            facts |= read_types(conn, unknown_types)
    return identify_columns(message, now, known, facts, epoch)
