"""Preflight checks of a source: all problems that prevent capture, each with the SQL that solves it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg import sql

from cdc.errors import (
    CdcError,
    ConfigError,
    InvalidDefinition,
    PreflightFailed,
    SlotInvalidated,
    SlotNotCreated,
    SlotUnsuitable,
    SourceError,
)
from cdc.postgres.connection import connect
from cdc.postgres.ddl_messages import read_seal
from cdc.postgres.publication import (
    COMPUTED_SENT,
    NOT_ALTERED,
    PublicationControl,
    addition_sql,
    comment_sql,
    creation_sql,
    missing_tables,
    partitioned_tables,
    read_publication,
    via_root_sql,
    why_not_added,
)
from cdc.postgres.session_settings import unsuitable_settings
from cdc.postgres.slot import PLUGIN, SlotStatus, slot_status
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import TableName, match_tables, uncapturable_tables
from cdc.postgres.visibility import sees_statistics, statistics_grant

OLDEST: Final = 150000
"""Oldest version of Postgres with which cdc is tested; Postgres 14 gets no more fixes since November 2026."""
DECODING_STANDBY: Final = 160000
"""First version of Postgres in which a standby supports logical decoding."""
_VIRTUAL: Final = "v"
"""Value of `pg_attribute.attgenerated` for a virtual generated column, which is never sent."""
_SLOT_NAME: Final = re.compile(r"[a-z0-9_]{1,63}\Z", re.ASCII)
_SETTINGS: Final = """
    SELECT current_setting('wal_level'), current_setting('effective_wal_level', true),
           current_setting('max_replication_slots')::int,
           current_setting('max_wal_senders')::int, (SELECT count(*) FROM pg_replication_slots)::int,
           (SELECT count(*) FROM pg_stat_replication)::int, pg_is_in_recovery(), current_database(), current_user,
           (SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user),
           has_database_privilege(current_database(), 'CREATE'),
           current_setting('rds.logical_replication', true) IS NOT NULL,
           EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_replication')
"""
_RIGHTS: Final = r"""
    SELECT c.oid, has_schema_privilege(c.relnamespace, 'USAGE'), has_table_privilege(c.oid, 'SELECT'),
           pg_has_role(c.relowner, 'USAGE'), c.relowner::regrole::text, c.relreplident::text,
           CASE c.relreplident
               WHEN 'f' THEN true
               WHEN 'i' THEN EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisreplident)
               WHEN 'd' THEN EXISTS (
                   SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate)
               ELSE false END,
           u.attname::text, u.attgenerated::text,
           row_security_active(c.oid)
    FROM pg_class c CROSS JOIN (SELECT current_setting('server_version_num')::int AS version) server LEFT JOIN LATERAL (
        SELECT a.attname, a.attgenerated FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> ''
        AND CASE WHEN c.relreplident = 'f' THEN version >= 180000 ELSE EXISTS (
            SELECT FROM pg_index i WHERE i.indrelid = c.oid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
            AND CASE c.relreplident WHEN 'i' THEN i.indisreplident WHEN 'd' THEN i.indisprimary ELSE false END) END
        AND NOT (version >= 180000 AND a.attgenerated = 's' AND EXISTS (
            SELECT FROM pg_publication p WHERE p.pubname = %(publication)s
            AND (to_jsonb(p) ->> 'pubgencols' = 's' OR EXISTS (
                SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = c.oid
                AND to_jsonb(r) ->> 'prattrs' ~ format('\m%%s\M', a.attnum)))))
        ORDER BY a.attgenerated DESC, a.attnum LIMIT 1
    ) u ON true
    WHERE c.oid = ANY(%(tables)s)
"""
"""Query for the privileges and the replica identity of tables.

Its subquery `u` returns one generated column that is part of the replica identity although Postgres does not send it.
It returns a virtual column if there is one.
"""


_PUBLISHED: Final = """
    SELECT DISTINCT coalesce(pg_partition_root(c.oid)::oid, c.oid) FROM pg_publication p
    JOIN pg_publication_tables t ON t.pubname = p.pubname JOIN pg_namespace n ON n.nspname = t.schemaname
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename WHERE p.pubupdate OR p.pubdelete
"""
"""Query for the tables of which some publication, ours or another, sends updates or deletes."""


@dataclass(frozen=True, slots=True)
class SourceRequirements:
    """The slot, publication and tables that a pipeline requires."""

    slot: str
    publication: str
    patterns: Sequence[str]
    exclude: Sequence[str] = ()
    create_slot: bool = True
    """True if the pipeline may create the slot."""
    control: PublicationControl = field(default_factory=PublicationControl)
    """Whether the pipeline may create and alter the publication."""


@dataclass(frozen=True, slots=True)
class PreflightProblem:
    """One problem of the source that a preflight check found."""

    code: str
    """Code CDC-xxxx of the error that capture would raise."""
    subject: str
    """Object that has the problem, such as `dsn`, a setting, `role NAME`, `slot NAME` or `publication NAME`.

    A table is named `schema.table`. If no table matches the patterns, the subject is `tables`.
    """
    message: str
    sql: str | None = None
    """SQL that solves the problem, to be run by a privileged role; None if SQL cannot solve it."""
    fatal: bool = True
    """False for a warning: capture works in spite of the problem."""
    table_only: bool = False
    """True if the role may not read this one table: the reader captures the others without it."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Facts about the source that the checks need."""

    dsn: str
    conn: psycopg.Connection
    wants: SourceRequirements
    wal_level: str
    effective_wal_level: str | None
    """The level that the server uses at present; None before Postgres 19."""
    max_slots: int
    max_senders: int
    slots: int
    senders: int
    standby: bool
    database: str
    role: str
    replication: bool
    """True if the role has the attribute REPLICATION; on managed servers the right may be a membership instead."""
    may_create: bool
    is_rds: bool
    has_rds_replication: bool
    """True if the server has a role whose members may replicate."""
    slot: SlotStatus | None
    tables: Sequence[tuple[int, TableName]]
    rights: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    published: frozenset[int] = frozenset()
    """OIDs of the tables of which a publication sends updates or deletes."""

    def when_writes_fail(self, oid: int) -> str:
        """Return since when updates and deletes of a table without a usable replica identity fail, for messages."""
        return "a publication has the table, so" if oid in self.published else "once the table is published,"

    @property
    def grantee(self) -> sql.Identifier:
        return sql.Identifier(self.role)


def preflight(dsn: str, wants: SourceRequirements) -> list[PreflightProblem]:
    """Return all problems of the source, fatal ones first; without a fatal problem the source can be captured.

    The checks change nothing. If the connection fails, the result contains this failure and the problems that can be
    found without a connection.
    """
    problems = list(_slot_name(wants))
    try:
        with connect(dsn, application_name="cdc doctor") as conn, map_errors():
            source = _read(dsn, conn, wants)
            problems += [problem for check in CHECKS for problem in check(source)]
    except (SourceError, ConfigError) as error:
        problems.append(_from_error(error, "dsn"))
    return sorted(problems, key=lambda problem: not problem.fatal)


def _from_error(error: CdcError, subject: str) -> PreflightProblem:
    return PreflightProblem(error.code, subject, f"{error.message}; {error.fix}")


def _problem(
    subject: str, message: str, statement: sql.Composable | str | None = None, **flags: bool
) -> PreflightProblem:
    text = statement.as_string(None) if isinstance(statement, sql.Composable) else statement
    return PreflightProblem(PreflightFailed.code, subject, message, text, **flags)


def _read(dsn: str, conn: psycopg.Connection, wants: SourceRequirements) -> _Source:
    settings: tuple[Any, ...] | None = conn.execute(_SETTINGS).fetchone()
    assert settings is not None  # noqa: S101 - a SELECT without FROM has one row
    tables = match_tables(conn, wants.patterns, wants.exclude)
    parameters = {"tables": [oid for oid, _ in tables], "publication": wants.publication}
    rights = {row[0]: row[1:] for row in conn.execute(_RIGHTS, parameters)}
    slot = slot_status(conn, wants.slot)
    published = frozenset(oid for (oid,) in conn.execute(_PUBLISHED))
    fields: list[Any] = [dsn, conn, wants, *settings, slot, tables, rights, published]
    return _Source(*fields)


def _slot_name(wants: SourceRequirements) -> Iterator[PreflightProblem]:
    if not _SLOT_NAME.match(wants.slot):
        yield PreflightProblem(
            InvalidDefinition.code,
            f"slot {wants.slot!r}",
            "the slot name is malformed: expected 1 to 63 lower-case letters, digits and underscores",
        )


def _version(source: _Source) -> Iterator[PreflightProblem]:
    if (reason := why_too_old(source.conn.info.server_version)) is not None:
        yield _problem("server_version", reason)


def why_too_old(version: int) -> str | None:
    """Return why a server of this version (`server_version_num`) is refused; None if it is not."""
    if version >= OLDEST:
        return None
    return f"the server is too old: expected Postgres {OLDEST // 10000} or newer, got {version // 10000}"


def _settings(source: _Source) -> Iterator[PreflightProblem]:
    yield from _wal_level(source)
    # the initial snapshot needs a second slot temporarily, see DraftSlot
    slots = 2 if source.wants.create_slot else 1
    for name, limit, used, needed in (
        ("max_replication_slots", source.max_slots, source.slots, slots),
        ("max_wal_senders", source.max_senders, source.senders, 1),
    ):
        # an existing slot needs no further one, and an active slot already has its walsender
        if used + needed > limit and (source.slot is None or (name == "max_wal_senders" and not source.slot.active)):
            yield _problem(
                name,
                f"{used} of {limit} are in use, and the reader needs {needed} more: raise the limit and restart "
                "the server",
                f"ALTER SYSTEM SET {name} = {used + 4};",
            )


def _wal_level(source: _Source) -> Iterator[PreflightProblem]:
    """Yield a problem if the server cannot decode its WAL.

    From version 19 on, a primary with wal_level = replica uses the level logical while a logical slot exists.
    """
    adapts = source.effective_wal_level is not None and source.wal_level == "replica" and not source.standby
    if adapts or "logical" in {source.wal_level, source.effective_wal_level}:
        return
    where = " at the primary" if source.standby and source.effective_wal_level is not None else ""
    how = (
        "set rds.logical_replication = 1 in its parameter group and reboot it"
        if source.is_rds
        else "a change requires a restart of the server"
    )
    yield _problem(
        "wal_level",
        f"the server has wal_level {source.wal_level!r}: expected 'logical'{where}; {how}",
        None if source.is_rds else "ALTER SYSTEM SET wal_level = 'logical';",
    )


def _session_settings(source: _Source) -> Iterator[PreflightProblem]:
    for setting in unsuitable_settings(source.conn):
        yield _problem(setting.name, setting.message, setting.sql, fatal=False)


def _role(source: _Source) -> Iterator[PreflightProblem]:
    subject = f"role {source.role}"
    if not source.replication and (refusal := _replication_refusal(source)) is not None:
        grant = "GRANT rds_replication TO {};" if source.has_rds_replication else "ALTER ROLE {} REPLICATION;"
        yield _problem(
            subject,
            f"may not replicate: {refusal.message}",
            sql.SQL(grant).format(source.grantee),  # type: ignore[arg-type] # one of two constants
        )
    if not sees_statistics(source.conn):
        yield _problem(
            subject,
            "does not see the statistics of other sessions: the metric cdc_feedback_age_seconds is absent, and "
            "a backfill during long transactions searches the whole log",
            statistics_grant(source.role),
            fatal=False,
        )
    version = source.conn.info.server_version
    if source.standby and version < DECODING_STANDBY:
        yield _problem("dsn", f"logical decoding on a standby requires version 16 or later, got {version // 10000}")


def _replication_refusal(source: _Source) -> CdcError | None:
    """Return the server's refusal of a replication connection; None if the role may replicate."""
    try:
        connect(source.dsn, replication=True, application_name="cdc doctor").close()
    except (SourceError, ConfigError) as error:
        return error
    return None


def _slot(source: _Source) -> Iterator[PreflightProblem]:
    slot, subject = source.slot, f"slot {source.wants.slot}"
    drop = sql.SQL("SELECT pg_drop_replication_slot({});").format(sql.Literal(source.wants.slot))
    if slot is None:
        if not source.wants.create_slot:
            create = sql.SQL("SELECT pg_create_logical_replication_slot({}, {});")
            statement = create.format(sql.Literal(source.wants.slot), sql.Literal(PLUGIN)).as_string(None)
            yield PreflightProblem(
                SlotNotCreated.code, subject, "does not exist, and source.slot.create is false", statement
            )
    elif slot.plugin != PLUGIN:
        kind = f"expected {PLUGIN!r}, got {slot.plugin or 'a physical slot'!r}"
        yield PreflightProblem(SlotUnsuitable.code, subject, f"belongs to another plugin: {kind}")
    elif slot.database != source.database:
        where = f"expected {source.database!r}, got {slot.database!r}"
        yield PreflightProblem(SlotUnsuitable.code, subject, f"belongs to another database: {where}")
    elif slot.wal_status == "lost" or slot.invalidation_reason:
        reason = slot.invalidation_reason or "wal_removed"
        yield PreflightProblem(SlotInvalidated.code, subject, f"is invalidated: {reason}", drop.as_string(None))
    elif slot.active:
        yield _problem(subject, f"is active: process {slot.active_pid} of the server streams from it", fatal=False)


def _triggers(source: _Source) -> Iterator[PreflightProblem]:
    """Yield a warning for event triggers whose messages the reader ignores."""
    installed = source.conn.execute("SELECT FROM pg_event_trigger WHERE evtname = 'cdc_ddl_end'").fetchone()
    if installed is not None and read_seal(source.conn) is None:
        yield _problem(
            "event trigger cdc_ddl_end",
            "an earlier version of cdc installed it, and the reader ignores its messages, because every role can "
            "write such ones: run 'cdc source install' again",
            fatal=False,
        )


def _tables(source: _Source) -> Iterator[PreflightProblem]:
    if not source.tables:
        yield _problem("tables", f"no table matches {list(source.wants.patterns)!r}")
    for oid, table in source.tables:
        yield from _table(source, oid, table)
    for unfit in uncapturable_tables(source.conn, source.wants.patterns, source.wants.exclude):
        yield _problem(str(unfit.name), f"{unfit.reason}; the table is not captured", unfit.sql, fatal=False)


def _table(source: _Source, oid: int, table: TableName) -> Iterator[PreflightProblem]:
    usage, select, _owner, _owner_name, identity, identified, computed, kind, hidden = source.rights[oid]
    name = sql.Identifier(*table)
    if not usage:
        grant = sql.SQL("GRANT USAGE ON SCHEMA {} TO {};").format(sql.Identifier(table.schema), source.grantee)
        yield _problem(str(table), f"role {source.role!r} does not have USAGE on its schema", grant, table_only=True)
    if not select:
        grant = sql.SQL("GRANT SELECT ON {} TO {};").format(name, source.grantee)
        yield _problem(
            str(table),
            f"role {source.role!r} does not have SELECT, which the initial snapshot needs",
            grant,
            table_only=True,
        )
    if not identified:
        what = "REPLICA IDENTITY NOTHING" if identity == "n" else "no primary key"
        yield _problem(
            str(table),
            f"has {what}: {source.when_writes_fail(oid)} updates and deletes fail at the source",
            sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL;").format(name),
        )
    if computed is not None:
        yield _problem(str(table), *_computed(source, oid, name, (computed, kind)))
    if hidden:
        yield _problem(
            str(table),
            f"has row-level security, which hides rows from role {source.role!r} in the initial snapshot",
            sql.SQL("ALTER ROLE {} BYPASSRLS;").format(source.grantee),
            table_only=True,
        )


def _computed(
    source: _Source, oid: int, table: sql.Identifier, generated: tuple[str, str]
) -> tuple[str, sql.Composed | None]:
    """Return message and SQL for a generated column, as name and kind, of the replica identity that is not sent."""
    column, kind = generated
    what = f"has the generated column {column!r} in its replica identity, but the column is not sent: "
    if source.conn.info.server_version < COMPUTED_SENT:
        whole = sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL;").format(table)
        return f"{what}different rows could have the same key", whole
    if kind == _VIRTUAL:
        return f"{what}a virtual column is never sent, so choose an index without it as replica identity", None
    what += f"{source.when_writes_fail(oid)} updates and deletes of the table fail at the source"
    name = source.wants.publication
    if read_publication(source.conn, name) is not None:
        alter = "ALTER PUBLICATION {} SET (publish_generated_columns = stored);"
        return what, sql.SQL(alter).format(sql.Identifier(name))
    create = "CREATE PUBLICATION {} WITH (publish_via_partition_root = true, publish_generated_columns = stored); "
    comment = sql.SQL(comment_sql(name, source.wants.control.pipeline))  # type: ignore[arg-type] # quoted there
    return what, sql.SQL(create).format(sql.Identifier(name)) + comment


def _publication(source: _Source) -> Iterator[PreflightProblem]:
    wants, names = source.wants, [table for _, table in source.tables]
    found = read_publication(source.conn, wants.publication)
    if found is None:
        yield from _publication_absent(source, names)
        return
    subject, allowed = f"publication {wants.publication}", found.is_alterable(wants.control)
    may_change = allowed and found.owned and not source.standby
    missing = missing_tables(source.conn, found, names)
    if missing and not found.takes_tables:
        yield _problem(subject, *why_not_added(source.conn, found, missing))
    elif missing and not (may_change and all(_owned(source, table) for table in missing)):
        why = (
            f", and role {source.role!r} cannot add them: this requires the primary and ownership of publication and "
            "tables"
            if allowed
            else f", and {NOT_ALTERED}"
        )
        listed = ", ".join(map(str, missing))
        yield _problem(subject, f"does not contain {listed}{why}", addition_sql(wants.publication, missing))
    if not found.operations:
        statement = sql.SQL("ALTER PUBLICATION {} SET (publish = 'insert, update, delete, truncate');")
        yield _problem(
            subject,
            "does not publish all operations: expected insert, update, delete, truncate",
            statement.format(sql.Identifier(wants.publication)),
        )
    if not found.via_root and not may_change:
        for table in partitioned_tables(source.conn, names):
            what = (
                f"is partitioned, but {subject} publishes the partitions under their own names, so their "
                "changes are not captured"
            )
            yield _problem(str(table), what, via_root_sql(wants.publication))


def _publication_absent(source: _Source, names: Sequence[TableName]) -> Iterator[PreflightProblem]:
    subject = f"publication {source.wants.publication}"
    statement = creation_sql(source.wants.publication, names, source.wants.control.pipeline)
    foreign = [table for table in names if not _owned(source, table)]
    if source.standby:
        yield _problem(subject, "does not exist; create it at the primary", statement)
    elif not source.wants.control.create:
        yield _problem(subject, "does not exist, and source.publication.create is false", statement)
    elif foreign:
        listed = ", ".join(map(str, foreign))
        yield _problem(subject, f"does not exist, and role {source.role!r} does not own {listed}", statement)
    elif not source.may_create:
        grant = sql.SQL("GRANT CREATE ON DATABASE {} TO {};").format(sql.Identifier(source.database), source.grantee)
        message = f"does not exist, and role {source.role!r} does not have CREATE on the database"
        yield _problem(subject, message, grant)


def _owned(source: _Source, table: TableName) -> bool:
    return any(name == table and bool(source.rights[oid][2]) for oid, name in source.tables)


CHECKS: Final[tuple[Callable[[_Source], Iterator[PreflightProblem]], ...]] = (
    _version, _settings, _session_settings, _role, _slot, _triggers, _tables, _publication,
)  # fmt: skip
"""All checks, in the order in which an operator would fix the problems."""
