"""Names of source tables and columns as paths and Delta columns: injective and reversible.

A name is never changed where it is safe as it stands, so that `shop.orders` is found under
`shop/orders`; every other byte is written as an escape sign and two hexadecimal digits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from cdc.errors import InvalidDefinition

PATH_ESCAPE: Final = "~"
"""Not `%`: delta-rs decodes `%41` in a URI and Hadoop's Path does not, so they would see two paths."""
COLUMN_ESCAPE: Final = "%"

POSITION_COLUMN: Final = "_position"
"""Delta column: position of the change that wrote the row, int64."""
ORDINAL_COLUMN: Final = "_ordinal"
"""Delta column: ordinal of that change inside its transaction, int64."""
RELATION_COLUMN: Final = "_relation"
"""Delta column of a target of many tables: the log's number of the table that the row is of, int64."""
OP_COLUMN: Final = "_op"
"""Delta column of a target of every change: the log's letter for it, string."""
COMMITTED_COLUMN: Final = "_committed_at"
"""Delta column of a target of every change, or of marked rows: when the row's change was committed, timestamp."""
GENERATION_COLUMN: Final = "_generation"
"""Delta column of a target of every change: where the full copy began that ended in this row, int64."""
DELETED_COLUMN: Final = "_deleted"
"""Delta column of a target of marked rows: whether the row is gone at the source, boolean."""
START_COLUMN: Final = "__START_AT"
"""Delta column of a target of versions: position of the transaction that the version began with, int64."""
END_COLUMN: Final = "__END_AT"
"""Delta column of a target of versions: position of the transaction that ended it, int64; null for the current one."""
FROM_COLUMN: Final = "_valid_from"
"""Delta column of a target of versions: when the transaction at `__START_AT` was committed, timestamp."""
TO_COLUMN: Final = "_valid_to"
"""Delta column of a target of versions: when the transaction at `__END_AT` was committed, timestamp."""

COLUMN_ID_KEY: Final = b"cdc.column_id"
"""Field metadata: the log's id of the column, decimal; names may change, ids do not."""

_PATH_SAFE: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")
_PLACEHOLDER: Final = re.compile(r"\{[a-z]+\}")


def path_segment(name: str) -> str:
    """One path segment for a schema's or table's name; names that differ give segments that differ.

    Upper case is escaped because some file systems fold it; a leading underscore because Spark
    takes such a folder for metadata. Raises ValueError for an empty name, which Postgres does not have.
    """
    if not name:
        raise ValueError("empty name")
    return "".join(
        char if char in _PATH_SAFE and not (place == 0 and char == "_") else _escaped(char, PATH_ESCAPE)
        for place, char in enumerate(name)
    )


def name_of_segment(segment: str) -> str:
    """The name that path_segment wrote."""
    return _unescaped(segment, PATH_ESCAPE)


def column_name(name: str) -> str:
    """The Delta column for a source column: letters, digits and `_` stay, other signs are escaped.

    Delta refuses ` ,;{}()` and control signs, SQL dialects split at dots and quotes. A leading
    underscore is escaped because such names are ours (`_position`, `_ordinal`).
    """
    if not name:
        raise ValueError("empty name")
    return "".join(
        char if char.isalnum() or (char == "_" and place > 0) else _escaped(char, COLUMN_ESCAPE)
        for place, char in enumerate(name)
    )


def name_of_column(column: str) -> str:
    """The name that column_name wrote."""
    return _unescaped(column, COLUMN_ESCAPE)


def target_uri(template: str, schema: str, table: str, more: Mapping[str, str] | None = None) -> str:
    """Where a sink's template puts a table: `{schema}`, `{table}` and what `more` names replaced by path segments."""
    named = {"schema": schema, "table": table, **(more or {})}
    segments = {f"{{{name}}}": path_segment(text) for name, text in named.items()}

    def filled(match: re.Match[str]) -> str:
        if match.group() not in segments:
            raise InvalidDefinition(
                f"unknown placeholder {match.group()!r} in path {template!r}: expected {{schema}} or {{table}}"
            )
        return segments[match.group()]

    return _PLACEHOLDER.sub(filled, template)


def published_uri(template: str) -> str:
    """Where a sink keeps its published record: `_cdc/published` under the path before the first placeholder."""
    fixed = _PLACEHOLDER.split(template, maxsplit=1)[0]
    root = fixed if fixed == template else fixed.rpartition("/")[0]
    return f"{root.rstrip('/')}/_cdc/published" if root or fixed.startswith("/") else "_cdc/published"


def parked_uri(record: str) -> str:
    """Where the rows lie that a sink has parked: beside its published record, which is at `record`."""
    folder, _, name = record.rpartition("/")
    # that of a target that is being built anew is removed with everything that begins with its name
    return f"{folder}/parked" if name == "published" else f"{record}-parked"


def _escaped(char: str, sign: str) -> str:
    return "".join(f"{sign}{byte:02X}" for byte in char.encode())


def _unescaped(text: str, sign: str) -> str:
    escapes = re.compile(f"(?:{sign}[0-9A-F]{{2}})+".encode())
    return escapes.sub(lambda m: bytes.fromhex(m.group().decode().replace(sign, "")), text.encode()).decode()
