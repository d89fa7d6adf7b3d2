"""DDL messages in the WAL: the event triggers that write them, and their parser.

`migrations/source/install.sql` installs event triggers that describe every altered table in a DDL message. Every role
that can connect can write a message with the same prefix. Therefore each message begins with a key that only the
functions of the triggers can read. The comment of an event trigger, which only its owner can set, has the SHA-256 of
the key; it is called the seal. A message without the key is ignored. The seal is part of `CatalogTable.witness`, so the
loss of authentic messages, for example those of an earlier version, never counts as a proof.
"""

from __future__ import annotations

import hashlib
import hmac
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
    1: "SET LOGGED or UNLOGGED: rows written while the table was unlogged are not in the stream",
    2: "a new column with values for existing rows",
    4: "a change of a column's type: its stored values may have changed",
}
"""Bit of `pg_event_trigger_table_rewrite_reason` → reason, for rewrites that can change values."""


KEY_LENGTH: Final = 72
"""Bytes of the key at the beginning of a DDL message; a space follows."""
_SEAL: Final = "SELECT obj_description(oid, 'pg_event_trigger') FROM pg_event_trigger WHERE evtname = 'cdc_ddl_end'"


@dataclass(frozen=True, slots=True)
class DdlMessage:
    """One DDL message: the new definition of a table, its removal, or the reason of a rewrite."""

    oid: int
    command: str
    table: CatalogTable | None
    dropped: bool
    rewrite: str | None


def read_seal(conn: psycopg.Connection) -> str | None:
    """Return the SHA-256 of the key of the event triggers; None if they are not installed, or by an earlier version."""
    with map_errors():
        row = conn.execute(_SEAL).fetchone()
    return None if row is None else row[0]


def is_sealed(content: bytes, seal: str | None) -> bool:
    """Return True if a DDL message begins with the key that belongs to the seal."""
    if seal is None or content[KEY_LENGTH : KEY_LENGTH + 1] != b" ":
        return False
    return hmac.compare_digest(hashlib.sha256(content[:KEY_LENGTH]).hexdigest().encode(), seal.encode())


def parse_ddl_message(content: bytes) -> DdlMessage | None:
    """Parse the content of a DDL message; None if it is malformed."""
    try:
        fields = json.loads(content[KEY_LENGTH:])
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
    """Return the table with the facts of its column types, as far as these types still exist."""
    with map_errors():
        known: dict[int, TypeFacts] = read_types(conn, [a.type_oid for a in table.live])
    return replace(table, attributes=tuple(replace(a, type=known.get(a.type_oid)) for a in table.attributes))


def run_trigger_script(dsn: str, name: str) -> None:
    """Run the SQL of `trigger_script` at the source. Raises PreflightFailed if the role may not do that."""
    with connect(dsn, application_name="cdc source") as conn, map_errors():
        conn.execute(trigger_script(name).encode())


def trigger_script(name: str) -> str:
    """Return the SQL that creates (`install`) or drops (`remove`) the event triggers in the source database."""
    return files("migrations").joinpath("source", f"{name}.sql").read_text(encoding="utf-8")
