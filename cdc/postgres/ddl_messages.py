"""Telling: what the event triggers in the source say in the WAL of a table, at the place where it was altered.

`migrations/source/install.sql` writes it. Whoever may connect can write such a message too, so one that cannot be
read is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Final

import psycopg

from cdc.postgres.connection import connect
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.system_catalog import Attribute, CatalogTable, TypeFacts, read_types
from cdc.table import ReplicaIdentity

REWRITES: Final = {
    1: "SET LOGGED or UNLOGGED: rows of the unlogged time are not in the stream",
    2: "a column that came with values for old rows",
    4: "a change of a column's type: its stored values may have changed",
}
"""Reasons of a rewrite that change what the rows say; the others (8: the access method) keep every value."""


@dataclass(frozen=True, slots=True)
class DdlMessage:
    """One message: a table as it is from here on, or that it is gone, or why its rows are being rewritten."""

    oid: int
    command: str
    table: CatalogTable | None
    dropped: bool
    rewrite: str | None


def parse_ddl_message(content: bytes) -> DdlMessage | None:
    """The message; None if it is none of ours."""
    try:
        fields = json.loads(content)
        return DdlMessage(
            oid=int(fields["oid"]),
            command=str(fields["command"]),
            table=_table(fields) if "attributes" in fields else None,
            dropped=fields.get("dropped") is True,
            rewrite=", ".join(why for bit, why in REWRITES.items() if int(fields.get("rewrite", 0)) & bit) or None,
        )
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None


def _table(fields: Mapping[str, Any]) -> CatalogTable:
    attributes = []
    for *plain, missing in fields["attributes"] or ():
        number, name, dropped, type_oid, typmod, not_null, generated, has_default, default = plain
        attributes.append(
            Attribute(
                number=int(number),
                name=str(name),
                dropped=bool(dropped),
                type_oid=int(type_oid),
                typmod=int(typmod),
                not_null=bool(not_null),
                generated=bool(generated),
                has_default=bool(has_default),
                default=default,
                type=None,
                missing=missing,
            )
        )
    return CatalogTable(
        schema=str(fields["schema"]),
        name=str(fields["name"]),
        replica_identity=ReplicaIdentity(fields["identity"]),
        attributes=tuple(attributes),
        key=tuple(int(number) for number in fields["key"] or ()),
        root=fields["root"],
        witness=fields["witness"],
    )


def with_types(conn: psycopg.Connection, table: CatalogTable) -> CatalogTable:
    """The told table with the names and kinds of its types, as far as they still exist."""
    with map_errors():
        known: dict[int, TypeFacts] = read_types(conn, [a.type_oid for a in table.live])
    return replace(table, attributes=tuple(replace(a, type=known.get(a.type_oid)) for a in table.attributes))


def run_trigger_script(dsn: str, name: str) -> None:
    """Run that script at the source; raises PreflightFailed for a role that may not."""
    with connect(dsn, application_name="cdc source") as conn, map_errors():
        conn.execute(trigger_script(name).encode())


def trigger_script(name: str) -> str:
    """The SQL that makes (`install`) or takes away (`remove`) the event triggers in the watched database."""
    return files("migrations").joinpath("source", f"{name}.sql").read_text(encoding="utf-8")
