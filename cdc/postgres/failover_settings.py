"""Settings that let a replication slot survive a promotion, checked on the primary and on each standby of the DSN.

Postgres 17 and later synchronize failover slots to standbys. Every problem here is a warning: capture works without
these settings, but after a promotion the slot may be missing, or the new primary may not have the log's last
transactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from cdc.errors import CdcError, PreflightFailed
from cdc.postgres.connection import connect, dsn_of_each_host, is_standby
from cdc.postgres.preflight import PreflightProblem
from cdc.postgres.slot import FAILOVER_SINCE, SlotStatus, slot_status
from cdc.postgres.sqlstate import map_errors

RELOAD: Final = " SELECT pg_reload_conf();"
_PHYSICAL: Final = """
    SELECT slot_name, active, xmin IS NOT NULL OR catalog_xmin IS NOT NULL
    FROM pg_replication_slots WHERE slot_type = 'physical' ORDER BY slot_name
"""
_SETTINGS: Final = "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)"
_ON_STANDBY: Final[tuple[LiteralString, ...]] = ("sync_replication_slots", "hot_standby_feedback")


def failover_problems(dsn: str, slot: str) -> list[PreflightProblem]:
    """Return a warning for each setting that could lose the slot, or transactions of the log, in a promotion.

    A host of the DSN that cannot be reached is a warning too, because its settings are unknown.
    """
    found: list[PreflightProblem] = []
    for host, own_dsn in dsn_of_each_host(dsn):
        try:
            with connect(own_dsn, application_name="cdc doctor") as conn, map_errors():
                if conn.info.server_version < FAILOVER_SINCE:
                    return [_warning("source.slot.failover", "failover slots need Postgres 17 or later")]
                check = _on_standby if is_standby(conn) else _on_primary
                found += check(conn, host, slot)
        except CdcError as exc:
            found.append(_warning(f"host {host}", f"its settings for a failover cannot be checked: {exc.message}"))
    return found


def _on_primary(conn: psycopg.Connection, host: str, slot: str) -> Iterator[PreflightProblem]:
    found = slot_status(conn, slot)
    if found is not None and not found.failover:
        yield _warning(
            f"slot {slot}",
            "is not synchronized to standbys; run over a replication connection (psql 'replication=database …')",
            sql.SQL("ALTER_REPLICATION_SLOT {} (FAILOVER);").format(sql.Identifier(slot)).as_string(None),
        )
    physical: dict[str, tuple[bool, bool]] = {row[0]: row[1:] for row in conn.execute(_PHYSICAL)}
    awaited = [name.strip() for name in _settings(conn, "synchronized_standby_slots")[0].split(",") if name.strip()]
    if not physical:
        yield _warning(
            f"host {host}",
            "no standby replicates through a physical slot, so no standby can synchronize the slot; set "
            "primary_slot_name on the standby",
            "SELECT pg_create_physical_replication_slot('standby_1', true);",
        )
    elif not awaited:
        names = ", ".join(name for name, (active, _) in physical.items() if active) or next(iter(physical))
        yield _warning(
            "synchronized_standby_slots",
            "the setting is empty, so the log can get transactions that no standby has; a promotion then loses them",
            _alter("synchronized_standby_slots", names),
        )
    for name in awaited:
        if not physical.get(name, (False, False))[0]:
            yield _warning(
                "synchronized_standby_slots",
                f"no standby uses the physical slot {name!r}, so the reader gets no changes until one does",
            )
    for name, (active, feeds_back) in physical.items():
        if active and not feeds_back:
            yield _warning(
                f"slot {name}",
                "its standby sends no feedback about the rows that it needs; run on the standby",
                _alter("hot_standby_feedback", "on"),
            )


def _on_standby(conn: psycopg.Connection, host: str, slot: str) -> Iterator[PreflightProblem]:
    for name, setting in zip(_ON_STANDBY, _settings(conn, *_ON_STANDBY), strict=True):
        if setting != "on":
            yield _warning(f"host {host}", f"the standby has {name} = {setting}", _alter(name, "on"))
    (primary_slot,) = _settings(conn, "primary_slot_name")
    if not primary_slot:
        yield _warning(
            f"host {host}", "the standby uses no physical slot of its primary", _alter("primary_slot_name", "standby_1")
        )
    found = slot_status(conn, slot)
    if not _is_synchronized(found):
        reason = "" if found is None or found.skip_reason is None else f" (slotsync_skip_reason {found.skip_reason})"
        yield _warning(
            f"host {host}",
            f"the standby does not have slot {slot!r} yet{reason}; if it stays so, primary_conninfo may have no "
            "dbname, or a slot of this name that is not synchronized exists there",
        )


def _is_synchronized(found: SlotStatus | None) -> bool:
    return found is not None and found.synced is True and found.invalidation_reason is None


def _settings(conn: psycopg.Connection, *names: str) -> list[str]:
    found: dict[str, Any] = dict(conn.execute(_SETTINGS, [list(names)]).fetchall())
    return [str(found.get(name, "")) for name in names]


def _alter(name: LiteralString, value: str) -> str:
    statement = sql.SQL("ALTER SYSTEM SET {} = {};").format(sql.SQL(name), sql.Literal(value))
    return statement.as_string(None) + RELOAD


def _warning(subject: str, message: str, statement: str | None = None) -> PreflightProblem:
    return PreflightProblem(PreflightFailed.code, subject, message, statement, fatal=False)
