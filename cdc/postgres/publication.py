"""The publication in Postgres: its tables, columns and rows, and whether this pipeline may create and alter it.

A publication may have other subscribers. A pipeline therefore never alters a publication that it did not create, unless
the definition contains `source.publication.manage: always`. A comment on the publication records which pipeline created
it. Earlier versions of cdc set no comment. So a publication with the default name, a table list and no comment also
counts as created by the pipeline.

Schemas and copies follow the column list of the publication. A copy must not contain columns that the list hides. The
schema that decodes the stream must list exactly the columns that the stream contains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import psycopg
from psycopg import sql

from cdc.errors import PreflightFailed, SlotBlocked
from cdc.postgres.chunk_queries import table_query
from cdc.postgres.copy_in_snapshot import copy_rows, copy_table, partitioned_oids
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import TableName, read_schemas
from cdc.table import Column, ReplicaIdentity, TableSchema

# to_jsonb: a publication of sequences came with version 19, and a missing key is null
_PUBLICATION: Final = """
    SELECT puballtables, coalesce((to_jsonb(p) ->> 'puballsequences')::boolean, false), pubviaroot,
           pubinsert AND pubupdate AND pubdelete AND pubtruncate,
           pg_has_role(pubowner, 'USAGE'), obj_description(oid, 'pg_publication')
    FROM pg_publication p WHERE pubname = %s
"""
_PARTITIONED: Final = """
    SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'p'
"""
# in a publication FOR ALL TABLES of version 19 a listed table with `prexcept` is one that is left out
_LISTED: Final = """
    SELECT n.nspname, c.relname
    FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
    JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE p.pubname = %s AND coalesce((to_jsonb(r) ->> 'prexcept')::boolean, false) = %s ORDER BY 1, 2
"""
_SCHEMAS: Final = """
    SELECT n.nspname FROM pg_publication p JOIN pg_publication_namespace s ON s.pnpubid = p.oid
    JOIN pg_namespace n ON n.oid = s.pnnspid WHERE p.pubname = %s
"""
_SENT_TABLES: Final = "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = %s"


_XIDS: Final = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text, pg_snapshot_xmax(pg_current_snapshot())::text"
_OPEN_TRANSACTIONS: Final = """
    SELECT format('pid %s (xid %s)', pid, backend_xid) FROM pg_stat_activity WHERE backend_xid IS NOT NULL
    UNION ALL SELECT format('prepared transaction %L (xid %s)', gid, transaction) FROM pg_prepared_xacts
"""
_POLL_INTERVAL: Final = 0.05
"""Seconds between two checks for open transactions; SQL has no statement that waits for their end."""
NOT_ALTERED: Final = "this pipeline may not alter it (source.publication.manage)"
"""Text in messages about publications that this pipeline may not alter."""
# to_jsonb: column lists and filters came with version 15
_SENT: Final = """
    SELECT c.oid::bigint, to_jsonb(t) -> 'attnames' FROM pg_publication_tables t
    JOIN pg_namespace n ON n.nspname = t.schemaname
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
    WHERE t.pubname = %s AND c.oid = ANY(%s)
"""
_FILTERED: Final = """
    SELECT t.schemaname, t.tablename FROM pg_publication_tables t
    WHERE t.pubname = %s AND to_jsonb(t) ->> 'rowfilter' IS NOT NULL
"""
COMPUTED_SENT: Final = 180000
"""First version of Postgres that can send generated columns.

`pg_publication_tables` of versions 15 to 17 lists generated columns, but these versions do not send them.
"""


@dataclass(frozen=True, slots=True)
class PublicationControl:
    """Permissions of a pipeline on its publication, from the definition."""

    pipeline: str = ""
    create: bool = True
    """True if the pipeline may create the publication, and then alter the publication that it created."""
    alter: bool | None = None
    """True if the pipeline may alter any publication, False if none, None if only a publication that it created."""


@dataclass(frozen=True, slots=True)
class PublicationFacts:
    """Properties of one publication, from its row in `pg_publication`."""

    name: str
    everything: bool
    """True if the publication is FOR ALL TABLES, perhaps with tables that it leaves out (EXCEPT)."""
    sequences: bool
    """True if the publication is FOR ALL SEQUENCES."""
    via_root: bool
    operations: bool
    """True if the publication contains all of inserts, updates, deletes and truncates."""
    owned: bool
    """True if the connected role has the privileges of the publication's owner."""
    comment: str | None

    @property
    def takes_tables(self) -> bool:
        """True if tables can be added to the publication with ALTER PUBLICATION … ADD TABLE."""
        return not self.everything and not self.sequences

    def is_made_for(self, pipeline: str) -> bool:
        """Return True if the comment names this pipeline as the creator of the publication.

        Without a comment, return True if the publication has the default name and a table list, and sends changes of
        partitions under their root's name.
        """
        if self.comment is not None:
            return self.comment == ownership_comment(pipeline)
        return self.name == f"cdc_{pipeline}_pub" and self.via_root and self.takes_tables

    def is_alterable(self, control: PublicationControl) -> bool:
        """Return True if the definition lets the pipeline alter the publication.

        The privileges of the role are not considered.
        """
        if control.alter is not None:
            return control.alter
        return control.create and self.is_made_for(control.pipeline)


def ownership_comment(pipeline: str) -> str:
    """Return the comment of a publication that this pipeline created."""
    return f"made by cdc for pipeline {pipeline}"


def read_publication(conn: psycopg.Connection, name: str) -> PublicationFacts | None:
    """Return the properties of the publication with that name; None if it does not exist."""
    with map_errors():
        row = conn.execute(_PUBLICATION, [name]).fetchone()
    return None if row is None else PublicationFacts(name, *row)


def ensure_publication(
    conn: psycopg.Connection,
    name: str,
    tables: Sequence[TableName],
    *,
    control: PublicationControl = PublicationControl(),
    timeout: float = 10.0,
) -> None:
    """Create the publication, or add missing tables to it, and wait for the end of older transactions.

    A snapshot for copying the tables can then be taken. No table is removed. Changes of partitions are sent under their
    root's name, so that moving a row between partitions is an update of one table. `conn` is in autocommit mode. Raises
    PreflightFailed if the role does not own publication and tables, or if `control` forbids the change. Raises
    SlotBlocked if older transactions are still open after `timeout` seconds; the caller may try again.
    """
    _publish(conn, name, tables, control)
    wait_for_older_transactions(conn, timeout)


def wait_for_older_transactions(conn: psycopg.Connection, timeout: float) -> None:
    """Wait for the end of every transaction that has an xid now; `timeout` is in seconds.

    Postgres does not send changes that such a transaction made before a table was added to the publication, even if it
    commits later. A snapshot taken before its end does not contain these changes either. Locking the tables would also
    work, but block writers. Raises SlotBlocked after the timeout.
    """
    deadline = time.monotonic() + timeout
    with map_errors():
        _, horizon = _xids(conn)
        while (oldest := _xids(conn)[0]) < horizon:
            if time.monotonic() >= deadline:
                listed = (
                    ", ".join(text for (text,) in conn.execute(_OPEN_TRANSACTIONS))
                    or f"a transaction with xid {oldest}"
                )
                raise SlotBlocked(
                    f"transactions that began before the tables were published are still open after {timeout:.0f} "
                    f"s: {listed}"
                )
            time.sleep(_POLL_INTERVAL)


def _xids(conn: psycopg.Connection) -> tuple[int, int]:
    """Return the oldest open xid, and the next xid to be assigned."""
    row = conn.execute(_XIDS).fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM has one row
    return int(row[0]), int(row[1])


def _publish(conn: psycopg.Connection, name: str, tables: Sequence[TableName], control: PublicationControl) -> None:
    found = read_publication(conn, name)
    with map_errors():
        if found is None:
            _create_publication(conn, name, tables, control)
            return
        missing = missing_tables(conn, found, tables)
        if missing and not found.takes_tables:
            message, statement = why_not_added(conn, found, missing)
            raise PreflightFailed(f"publication {name!r} {message}", remedy=statement)
        by_leaf = [] if found.via_root else partitioned_tables(conn, tables)
        if not found.is_alterable(control):
            _refuse(name, missing, by_leaf)
            return
        if not found.via_root:
            conn.execute(_via_root(name))
        if missing:
            conn.execute(
                sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(sql.Identifier(name), _table_list(missing))
            )


def _create_publication(
    conn: psycopg.Connection, name: str, tables: Sequence[TableName], control: PublicationControl
) -> None:
    if not control.create:
        raise PreflightFailed(
            f"publication {name!r} does not exist, and source.publication.create is false",
            remedy=creation_sql(name, tables, control.pipeline),
        )
    with conn.transaction():
        conn.execute(_creation(name, tables))
        conn.execute(_comment(name, control.pipeline))


def _refuse(name: str, missing: Sequence[TableName], by_leaf: Sequence[TableName]) -> None:
    """Raise PreflightFailed if one of the lists is not empty; otherwise do nothing.

    `missing` lists tables that the publication does not contain, and `by_leaf` partitioned tables whose partitions it
    publishes under their own names.
    """
    if missing:
        listed = ", ".join(map(str, missing))
        raise PreflightFailed(
            f"publication {name!r} does not contain {listed}, and {NOT_ALTERED}", remedy=addition_sql(name, missing)
        )
    if by_leaf:
        listed = ", ".join(map(str, by_leaf))
        raise PreflightFailed(
            f"publication {name!r} publishes the partitions of {listed} under their own names, and {NOT_ALTERED}",
            remedy=via_root_sql(name),
        )


def partitioned_tables(conn: psycopg.Connection, tables: Sequence[TableName]) -> list[TableName]:
    """Return the partitioned tables among the given tables."""
    with map_errors():
        found = {TableName(*row) for row in conn.execute(_PARTITIONED)}
    return [table for table in tables if table in found]


def missing_tables(
    conn: psycopg.Connection, publication: PublicationFacts, tables: Sequence[TableName]
) -> list[TableName]:
    """Return the given tables that a publication does not contain, according to the server's view.

    The view has the partitions, and not the table, if changes of a partitioned table are sent under partitions' names.
    """
    sent = {TableName(*row) for row in conn.execute(_SENT_TABLES, [publication.name])}
    missing = [table for table in tables if table not in sent]
    if publication.via_root or not missing:
        return missing
    by_leaf = partitioned_tables(conn, missing)
    return [table for table in missing if table not in by_leaf or not _contains_root(conn, publication, table)]


def _contains_root(conn: psycopg.Connection, publication: PublicationFacts, table: TableName) -> bool:
    """Return True if the publication contains a partitioned table, whatever the name under which changes are sent."""
    if publication.everything:
        return table not in _listed(conn, publication.name, left_out=True)
    schemas = {row[0] for row in conn.execute(_SCHEMAS, [publication.name])}
    return table in _listed(conn, publication.name) or table.schema in schemas


def _listed(conn: psycopg.Connection, name: str, *, left_out: bool = False) -> list[TableName]:
    """Return the tables in the publication's list, or the tables that FOR ALL TABLES leaves out."""
    return [TableName(*row) for row in conn.execute(_LISTED, [name, left_out])]


def why_not_added(
    conn: psycopg.Connection, publication: PublicationFacts, missing: Sequence[TableName]
) -> tuple[str, str | None]:
    """Return why the missing tables cannot be added to a publication that takes no tables, and the SQL that helps.

    A person left them out of all tables, and only the owner of the database may change that.
    """
    listed = ", ".join(map(str, missing))
    if not publication.everything:
        other = "name another publication in source.publication.name"
        return f"is FOR ALL SEQUENCES, so Postgres does not add {listed} to it: {other}", None
    left_out = [table for table in _listed(conn, publication.name, left_out=True) if table not in missing]
    kept = sql.SQL(" EXCEPT (TABLE {})").format(_table_list(left_out)) if left_out else sql.SQL("")
    sequences = sql.SQL(", ALL SEQUENCES" if publication.sequences else "")
    statement = sql.SQL("ALTER PUBLICATION {} SET ALL TABLES{}{};").format(
        sql.Identifier(publication.name), kept, sequences
    )
    return (
        f"leaves out {listed} (FOR ALL TABLES EXCEPT): put such tables into 'exclude', or publish them",
        statement.as_string(None),
    )


def drop_table(conn: psycopg.Connection, name: str, table: TableName) -> None:
    """Remove a table from the publication's table list; do nothing if it is not in the list."""
    with map_errors():
        if table in _listed(conn, name):
            statement = sql.SQL("ALTER PUBLICATION {} DROP TABLE ONLY {}")
            conn.execute(statement.format(sql.Identifier(name), sql.Identifier(*table)))


def creation_sql(name: str, tables: Sequence[TableName], pipeline: str) -> str:
    """Return the SQL that creates the publication of a pipeline, for an operator to run."""
    return f"{_creation(name, tables).as_string(None)}; {comment_sql(name, pipeline)}"


def comment_sql(name: str, pipeline: str) -> str:
    """Return the SQL that records in a comment which pipeline created the publication."""
    return _comment(name, pipeline).as_string(None) + ";"


def _comment(name: str, pipeline: str) -> sql.Composed:
    return sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(
        sql.Identifier(name), sql.Literal(ownership_comment(pipeline))
    )


def addition_sql(name: str, tables: Sequence[TableName]) -> str:
    """Return the SQL that adds the tables to the publication, for an operator to run."""
    statement = sql.SQL("ALTER PUBLICATION {} ADD TABLE {};").format(sql.Identifier(name), _table_list(tables))
    return statement.as_string(None)


def via_root_sql(name: str) -> str:
    """Return the SQL that makes Postgres send changes of partitions under their root's name, for an operator to run."""
    return _via_root(name).as_string(None) + ";"


def _via_root(name: str) -> sql.Composed:
    return sql.SQL("ALTER PUBLICATION {} SET (publish_via_partition_root = true)").format(sql.Identifier(name))


def _creation(name: str, tables: Sequence[TableName]) -> sql.Composed:
    members = sql.SQL(" FOR TABLE {}").format(_table_list(tables)) if tables else sql.SQL("")
    return sql.SQL("CREATE PUBLICATION {}{} WITH (publish_via_partition_root = true)").format(
        sql.Identifier(name), members
    )


def _table_list(tables: Sequence[TableName]) -> sql.Composed:
    # without ONLY inheritance children would be added too, whether or not a rule matches them
    return sql.SQL(", ").join(sql.SQL("ONLY {}").format(sql.Identifier(*table)) for table in tables)


def published_schema(
    conn: psycopg.Connection, oid: int, publication: str, relation: int | None = None
) -> TableSchema | None:
    """Return the schema of one table with the columns that the publication sends; None if the table does not exist.

    `relation` is the log's number of the table, by default its OID.
    """
    schema = published_schemas(conn, [oid], publication).get(oid)
    return schema if schema is None or relation is None else replace(schema, relation=relation)


def published_schemas(conn: psycopg.Connection, oids: Sequence[int], publication: str) -> dict[int, TableSchema]:
    """Return the schemas of tables with the columns that the publication sends, by OID.

    The schema of a table that is not in the publication has all columns.
    """
    schemas = read_schemas(conn, oids, publication=publication)
    with map_errors():
        found = conn.execute(_SENT, [publication, list(oids)]).fetchall()
    listed = {oid: columns for oid, columns in found if columns is not None}
    computed = conn.info.server_version >= COMPUTED_SENT
    return {
        oid: _without_unsent_key(
            replace(schema, columns=_sent(schema.columns, listed[oid], computed=computed)) if oid in listed else schema
        )
        for oid, schema in schemas.items()
    }


def published_rows(conn: psycopg.Connection, publication: str) -> Callable[[TableSchema], Iterator[memoryview]]:
    """Return a function that yields those rows of a table that the publication sends, in COPY's text format.

    The lists of tables with a row filter and of partitioned tables are read once, when `published_rows` is called.
    """
    partitioned = partitioned_oids(conn)
    with map_errors():
        filtered = {TableName(*row) for row in conn.execute(_FILTERED, [publication])}

    def rows_of(schema: TableSchema) -> Iterator[memoryview]:
        if (schema.schema, schema.name) not in filtered:
            return copy_table(conn, schema, partitioned)
        with map_errors():
            query = table_query(conn, schema, publication)
        return copy_rows(conn, query, schema)

    return rows_of


def _without_unsent_key(schema: TableSchema) -> TableSchema:
    """Remove the key if REPLICA IDENTITY is FULL and a key column is not sent; otherwise return the schema unchanged.

    A row of a table without a key is identified by all its values.
    """
    if schema.replica_identity is not ReplicaIdentity.FULL or not any(column.generated for column in schema.key):
        return schema
    return replace(schema, columns=tuple(replace(column, key=None) for column in schema.columns))


def _sent(columns: Sequence[Column], listed: Collection[str], *, computed: bool) -> tuple[Column, ...]:
    """Return the columns that `listed` names, and all generated columns.

    `listed` contains the column names of `pg_publication_tables`. `computed` is true if the server can send generated
    columns. A generated column in `listed` is then returned as not generated, because the server sends it.
    """
    return tuple(
        replace(column, generated=column.generated and not (computed and column.name in listed))
        for column in columns
        if column.generated or column.name in listed
    )
