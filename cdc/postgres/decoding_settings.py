"""Checks of the server's version, of its system catalogs, and of settings that restrict logical decoding.

A new version of Postgres may give a system catalog a new meaning: version 19 put tables that a publication leaves out
into the list of its tables. So a version, or a column of the catalogs of publications, that cdc does not know is a
warning.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from cdc.errors import CdcError, OutputPluginRefused, PreflightFailed
from cdc.postgres.connection import connect
from cdc.postgres.preflight import PreflightProblem
from cdc.postgres.slot import PLUGIN, create_slot, slot_status
from cdc.postgres.sqlstate import map_errors

NEWEST: Final = 19
"""Newest major version of Postgres with which cdc was tested."""
KNOWN_COLUMNS: Final = {
    "pg_publication": (
        "oid pubname pubowner puballtables puballsequences pubinsert pubupdate pubdelete pubtruncate pubviaroot "
        "pubgencols"
    ),
    "pg_publication_rel": "oid prpubid prrelid prexcept prqual prattrs",
    "pg_publication_namespace": "oid pnpubid pnnspid",
    "pg_inherits": "inhrelid inhparent inhseqno inhdetachpending",
}
"""System catalog → the columns that versions up to NEWEST have; other ones could change what a publication contains."""
PROBE_WITHIN: Final = 2.0
"""Seconds to wait for a trial slot: the server refuses a plugin at once, and then waits for open transactions."""
_PLUGINS: Final = "output_plugin_libraries"
_IDLE: Final = "idle_replication_slot_timeout"
_COLUMNS: Final = """
    SELECT c.relname, a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    WHERE c.relnamespace = 'pg_catalog'::regnamespace AND c.relname = ANY(%s) AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY 1, a.attnum
"""
_SOURCE: Final = "SELECT source, current_database(), current_user FROM pg_settings WHERE name = %s"


def decoding_problems(dsn: str, slot: str) -> list[PreflightProblem]:
    """Return the problems of the server that hold for every table; only a refused output plugin is fatal."""
    with connect(dsn, application_name="cdc doctor") as conn, map_errors():
        return [
            *_version(conn.info.server_version // 10000),
            *unknown_columns(conn, KNOWN_COLUMNS),
            *_idle_slots(conn),
            *_plugins(conn, dsn, slot),
        ]


def _version(major: int) -> Iterator[PreflightProblem]:
    if major > NEWEST:
        message = f"cdc was tested with Postgres up to version {NEWEST}, got {major}: look for a newer release of cdc"
        yield _warning("server_version", message)


def unknown_columns(conn: psycopg.Connection, known: Mapping[str, str]) -> Iterator[PreflightProblem]:
    """Yield a warning for each column of the given system catalogs that is not in the list of known columns."""
    for catalog, column in conn.execute(_COLUMNS, [list(known)]):
        if column not in known[catalog].split():
            message = (
                f"has the column {column!r}, which cdc does not know: changes may be missing; look for a newer release "
                "of cdc, and run 'cdc verify'"
            )
            yield _warning(catalog, message)


def _idle_slots(conn: psycopg.Connection) -> Iterator[PreflightProblem]:
    limit = _setting(conn, _IDLE)
    if limit not in {None, "0"}:
        message = (
            f"the server invalidates a slot that is idle for {limit}: a reader that is stopped for longer has to copy "
            "all tables again"
        )
        yield _warning(_IDLE, message, _set_for_server(_IDLE, "0"))


def _plugins(conn: psycopg.Connection, dsn: str, slot: str) -> Iterator[PreflightProblem]:
    """Yield a problem if the server allows no slot of pgoutput to be created or resumed.

    Only privileged roles may read the setting. For another role a temporary slot is created, unless the pipeline's slot
    is in use, which proves that pgoutput is allowed.
    """
    try:
        listed = _setting(conn, _PLUGINS)
    except psycopg.errors.InsufficientPrivilege:
        status = slot_status(conn, slot)
        if (status is None or not status.active) and _is_refused(dsn):
            message = (
                f"does not name {PLUGIN}, so a slot can be neither created nor resumed; its value is visible only to "
                f"members of pg_read_all_settings: add {PLUGIN} to it, and reload the configuration"
            )
            yield PreflightProblem(OutputPluginRefused.code, _PLUGINS, message)
        return
    names = [] if listed is None else [name.strip().strip('"') for name in listed.split(",")]
    if listed is None or PLUGIN in names:
        return
    message = f"is {listed!r}, without {PLUGIN}: a slot can be neither created nor resumed"
    wanted = ", ".join(filter(None, [*names, PLUGIN]))
    yield PreflightProblem(OutputPluginRefused.code, _PLUGINS, message, _set_where_it_is_set(conn, wanted))


def _is_refused(dsn: str) -> bool:
    with suppress(CdcError):
        try:
            with create_slot(dsn, f"cdc_trial_{uuid.uuid4().hex[:12]}", temporary=True, timeout=PROBE_WITHIN):
                return False
        except OutputPluginRefused:
            return True
    return False  # other obstacles are reported by their own checks


def _set_where_it_is_set(conn: psycopg.Connection, value: str) -> str:
    """Return the SQL that changes the setting of the plugins where its value comes from."""
    row = conn.execute(_SOURCE, [_PLUGINS]).fetchone()
    source, database, role = row or ("default", "", "")
    target: dict[str, sql.Composed] = {
        "database": sql.SQL("ALTER DATABASE {} ").format(sql.Identifier(database)),
        "user": sql.SQL("ALTER ROLE {} ").format(sql.Identifier(role)),
        "database user": sql.SQL("ALTER ROLE {} IN DATABASE {} ").format(
            sql.Identifier(role), sql.Identifier(database)
        ),
    }
    if source not in target:
        return _set_for_server(_PLUGINS, value)
    names: Any = [sql.Literal(name) for name in value.split(", ")]
    return (target[source] + sql.SQL("SET {} = {};").format(sql.SQL(_PLUGINS), sql.SQL(", ").join(names))).as_string(
        None
    )


def _set_for_server(name: LiteralString, value: str) -> str:
    statement = sql.SQL("ALTER SYSTEM SET {} = {}; SELECT pg_reload_conf();")
    values: Any = [sql.Literal(part) for part in value.split(", ")]
    return statement.format(sql.SQL(name), sql.SQL(", ").join(values)).as_string(None)


def _setting(conn: psycopg.Connection, name: str) -> str | None:
    """Return the value of a setting; None if this version of Postgres does not have it."""
    row = conn.execute("SELECT current_setting(%s, true)", [name]).fetchone()
    return None if row is None or row[0] is None else str(row[0])


def _warning(subject: str, message: str, statement: str | None = None) -> PreflightProblem:
    return PreflightProblem(PreflightFailed.code, subject, message, statement, fatal=False)
