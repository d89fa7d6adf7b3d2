"""Settings of a role, a database or the server that cdc cannot pin for its sessions, and where each of them is set.

`connection.PINNED` has the settings that cdc sets itself. Only a superuser may set the ones of this module, or a user's
SQL needs them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import psycopg
from psycopg import sql

from cdc.postgres.sqlstate import map_errors

_SETTINGS: Final = """
    SELECT name, setting, source, current_user, current_database() FROM pg_settings WHERE name = ANY(%s) ORDER BY name
"""
_RESET: Final = {
    "user": "ALTER ROLE {role} RESET {name};",
    "database": "ALTER DATABASE {database} RESET {name};",
    "database user": "ALTER ROLE {role} IN DATABASE {database} RESET {name};",
    "global": "ALTER ROLE ALL RESET {name};",
    "configuration file": "ALTER ROLE {role} SET {name} = {value};",
}
"""Statement that ends the effect of a setting on the sessions of a role, by the source that `pg_settings` names."""
_PLACES: Final = {
    "user": "for the role",
    "database": "for the database",
    "database user": "for the role in the database",
    "global": "for all roles",
    "configuration file": "in the configuration of the server",
    "client": "in the options of source.dsn",
}


class UnsuitableSetting(NamedTuple):
    """A setting that can disturb the sessions of cdc."""

    name: str
    message: str
    """Its value, where it is set, and what it does."""
    sql: str | None
    """Statement that ends its effect; None if it is set in the options of the DSN or of the server's start."""


class _Check(NamedTuple):
    is_unsuitable: Callable[[str], bool]
    effect: str
    default: str


def _puts_schema_before_the_catalog(path: str) -> bool:
    schemas = [schema.strip().strip('"') for schema in path.split(",")]
    return "pg_catalog" in schemas[1:]


_CHECKS: Final = {
    "lc_messages": _Check(
        lambda value: value not in {"", "C", "POSIX", "C.UTF-8"} and not value.startswith("en"),
        "cdc reads English messages, so a refused login is reported as an unreachable source",
        "C",
    ),
    "search_path": _Check(
        _puts_schema_before_the_catalog,
        "functions and operators of a schema before pg_catalog replace those that cdc calls",
        "public",
    ),
    "temp_file_limit": _Check(
        lambda value: value != "-1", "a copy in key order fails if the source sorts more than that", "-1"
    ),
}


def unsuitable_settings(conn: psycopg.Connection) -> Iterator[UnsuitableSetting]:
    """Yield each setting of the session that can disturb cdc and that cdc cannot pin."""
    with map_errors():
        rows = conn.execute(_SETTINGS, [list(_CHECKS)]).fetchall()
    for name, value, source, role, database in rows:
        check = _CHECKS[name]
        if check.is_unsuitable(value):
            message = f"is {value!r}, set {_PLACES.get(source, f'by {source}')}: {check.effect}"
            yield UnsuitableSetting(name, message, _reset(source, name, (role, database), check.default))


def _reset(source: str, name: str, place: tuple[str, str], default: str) -> str | None:
    if source not in _RESET:
        return None
    role, database = map(sql.Identifier, place)
    statement = sql.SQL(_RESET[source])  # type: ignore[arg-type] # constants
    values = {"role": role, "database": database, "name": sql.Identifier(name), "value": sql.Literal(default)}
    return statement.format(**values).as_string(None)
