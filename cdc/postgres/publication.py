"""The publication: which tables pgoutput sends, and whether this pipeline may alter it.

A publication may have other subscribers. So one that this pipeline did not make is never altered, unless the
definition says `source.publication.manage: always`. Evidence is the comment that `CREATE PUBLICATION` is followed by;
earlier versions set none, so a publication of the default name that lists tables and has no comment counts as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from cdc.errors import PreflightFailed, SlotBlocked
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import TableName

_PUBLICATION: Final = """
    SELECT puballtables, pubviaroot, pubinsert AND pubupdate AND pubdelete AND pubtruncate,
           pg_has_role(pubowner, 'USAGE'), obj_description(oid, 'pg_publication')
    FROM pg_publication WHERE pubname = %s
"""
_PARTITIONED: Final = """
    SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'p'
"""
_LISTED: Final = """
    SELECT n.nspname, c.relname
    FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
    JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE p.pubname = %s
"""
_SCHEMAS: Final = """
    SELECT n.nspname FROM pg_publication p JOIN pg_publication_namespace s ON s.pnpubid = p.oid
    JOIN pg_namespace n ON n.oid = s.pnnspid WHERE p.pubname = %s
"""


_OLDEST: Final = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text, pg_snapshot_xmax(pg_current_snapshot())::text"
_HOLDERS: Final = """
    SELECT format('pid %s (xid %s)', pid, backend_xid) FROM pg_stat_activity WHERE backend_xid IS NOT NULL
    UNION ALL SELECT format('prepared transaction %L (xid %s)', gid, transaction) FROM pg_prepared_xacts
"""
_ASK_EVERY: Final = 0.05
"""Seconds between two questions whether they have ended; there is nothing in SQL to wait on."""


@dataclass(frozen=True, slots=True)
class PublicationControl:
    """What the definition of a pipeline allows it to do with its publication."""

    pipeline: str = ""
    create: bool = True
    """Whether it may be created, and altered where this pipeline made it."""
    alter: bool | None = None
    """Whether it may be altered, whatever created it; None: only if this pipeline did."""


@dataclass(frozen=True, slots=True)
class PublicationFacts:
    """One publication as `pg_publication` shows it."""

    name: str
    everything: bool
    """FOR ALL TABLES."""
    via_root: bool
    operations: bool
    """Whether it publishes inserts, updates, deletes and truncates."""
    owned: bool
    """Whether the role has the rights of its owner."""
    comment: str | None

    def is_made_for(self, pipeline: str) -> bool:
        """Whether this pipeline made it; see the top of the module."""
        if self.comment is not None:
            return self.comment == ownership_comment(pipeline)
        return self.name == f"cdc_{pipeline}_pub" and self.via_root and not self.everything

    def is_alterable(self, control: PublicationControl) -> bool:
        """Whether the pipeline may alter it; whether the role can is another question."""
        if control.alter is not None:
            return control.alter
        return control.create and self.is_made_for(control.pipeline)


def ownership_comment(pipeline: str) -> str:
    """The comment of a publication that this pipeline made."""
    return f"made by cdc for pipeline {pipeline}"


def read_publication(conn: psycopg.Connection, name: str) -> PublicationFacts | None:
    """The publication of that name; None if there is none."""
    with map_errors():
        row = conn.execute(_PUBLICATION, [name]).fetchone()
    return None if row is None else PublicationFacts(name, *row)


def ensure_publication(
    conn: psycopg.Connection,
    name: str,
    tables: Sequence[TableName],
    *,
    control: PublicationControl = PublicationControl(),
    patience: float = 10.0,
) -> None:
    """Create the publication, or add what it lacks; nothing is taken out of it. Returns when a snapshot may follow.

    Partitions are published under their root's name, so that moving a row between them is an update
    of one table. `conn` commits by itself. Raises PreflightFailed if the role owns neither publication nor tables, or
    if `control` does not allow what is necessary; SlotBlocked if older transactions are still open after `patience`
    seconds; it can be called again.
    """
    _publish(conn, name, tables, control)
    wait_for_older_transactions(conn, patience)


def wait_for_older_transactions(conn: psycopg.Connection, patience: float) -> None:
    """Wait for the end of every transaction that has an xid now.

    What one of them wrote in a table before it was published is not sent, though it commits later; a snapshot taken
    while it is open would not have it either. Locking the tables would do as well, and hold up their writers.
    """
    deadline = time.monotonic() + patience
    with map_errors():
        _, horizon = _xids(conn)
        while (oldest := _xids(conn)[0]) < horizon:
            if time.monotonic() >= deadline:
                listed = ", ".join(text for (text,) in conn.execute(_HOLDERS)) or f"somebody with xid {oldest}"
                raise SlotBlocked(f"open since before the tables were published, for {patience:.0f} s now: {listed}")
            time.sleep(_ASK_EVERY)


def _xids(conn: psycopg.Connection) -> tuple[int, int]:
    """The oldest xid that is open, and the next that will be given."""
    row = conn.execute(_OLDEST).fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM has one row
    return int(row[0]), int(row[1])


def _publish(conn: psycopg.Connection, name: str, tables: Sequence[TableName], control: PublicationControl) -> None:
    found = read_publication(conn, name)
    with map_errors():
        if found is None:
            _make(conn, name, tables, control)
            return
        lacking = [] if found.everything else missing_tables(conn, name, tables)
        by_leaf = [] if found.via_root else partitioned_tables(conn, tables)
        if not found.is_alterable(control):
            _refuse(name, lacking, by_leaf)
            return
        if not found.via_root:
            conn.execute(_via_root(name))
        if lacking:
            conn.execute(sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(sql.Identifier(name), _names(lacking)))


def _make(conn: psycopg.Connection, name: str, tables: Sequence[TableName], control: PublicationControl) -> None:
    if not control.create:
        raise PreflightFailed(
            f"publication {name!r} does not exist", remedy=creation_sql(name, tables, control.pipeline)
        )
    with conn.transaction():
        conn.execute(_create(name, tables))
        conn.execute(_comment(name, control.pipeline))


def _refuse(name: str, lacking: Sequence[TableName], by_leaf: Sequence[TableName]) -> None:
    """Raise PreflightFailed if a publication that may not be altered does not send what is wanted."""
    if lacking:
        listed = ", ".join(map(str, lacking))
        raise PreflightFailed(
            f"publication {name!r} {NOT_ALTERED} and lacks {listed}", remedy=addition_sql(name, lacking)
        )
    if by_leaf:
        listed = ", ".join(map(str, by_leaf))
        raise PreflightFailed(
            f"publication {name!r} {NOT_ALTERED} and publishes the partitions of {listed} under their own names",
            remedy=via_root_sql(name),
        )


NOT_ALTERED: Final = "is not altered by this pipeline (source.publication.manage)"
"""Why something about a publication is left to its owner."""


def partitioned_tables(conn: psycopg.Connection, tables: Sequence[TableName]) -> list[TableName]:
    """Those of the tables that are partitioned."""
    with map_errors():
        found = {TableName(*row) for row in conn.execute(_PARTITIONED)}
    return [table for table in tables if table in found]


def missing_tables(conn: psycopg.Connection, name: str, tables: Sequence[TableName]) -> list[TableName]:
    """Those of the tables that a publication by list or by schema does not name."""
    listed = {TableName(*row) for row in conn.execute(_LISTED, [name])}
    schemas: set[str] = set()
    if conn.info.server_version >= 150000:  # noqa: PLR2004 - FOR TABLES IN SCHEMA came with 15
        schemas = {row[0] for row in conn.execute(_SCHEMAS, [name])}
    return [table for table in tables if table not in listed and table.schema not in schemas]


def drop_table(conn: psycopg.Connection, name: str, table: TableName) -> None:
    """Take a table out of the publication; nothing if it is not listed there."""
    with map_errors():
        if table in {TableName(*row) for row in conn.execute(_LISTED, [name])}:
            statement = sql.SQL("ALTER PUBLICATION {} DROP TABLE ONLY {}")
            conn.execute(statement.format(sql.Identifier(name), sql.Identifier(*table)))


def creation_sql(name: str, tables: Sequence[TableName], pipeline: str) -> str:
    """The statements that make the publication for a pipeline, for a person to run."""
    return f"{_create(name, tables).as_string(None)}; {comment_sql(name, pipeline)}"


def comment_sql(name: str, pipeline: str) -> str:
    """The statement that says for which pipeline a publication was made."""
    return _comment(name, pipeline).as_string(None) + ";"


def _comment(name: str, pipeline: str) -> sql.Composed:
    return sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(
        sql.Identifier(name), sql.Literal(ownership_comment(pipeline))
    )


def addition_sql(name: str, tables: Sequence[TableName]) -> str:
    """The statement that adds the tables, for a person to run."""
    statement = sql.SQL("ALTER PUBLICATION {} ADD TABLE {};").format(sql.Identifier(name), _names(tables))
    return statement.as_string(None)


def via_root_sql(name: str) -> str:
    """The statement that has it publish partitions under their root's name, for a person to run."""
    return _via_root(name).as_string(None) + ";"


def _via_root(name: str) -> sql.Composed:
    return sql.SQL("ALTER PUBLICATION {} SET (publish_via_partition_root = true)").format(sql.Identifier(name))


def _create(name: str, tables: Sequence[TableName]) -> sql.Composed:
    members = sql.SQL(" FOR TABLE {}").format(_names(tables)) if tables else sql.SQL("")
    return sql.SQL("CREATE PUBLICATION {}{} WITH (publish_via_partition_root = true)").format(
        sql.Identifier(name), members
    )


def _names(tables: Sequence[TableName]) -> sql.Composed:
    # without ONLY the children of a table come along, whether a rule matches them or not
    return sql.SQL(", ").join(sql.SQL("ONLY {}").format(sql.Identifier(*table)) for table in tables)
