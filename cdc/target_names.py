"""Names in targets: paths of tables, names of Delta columns, and names of the columns that cdc adds.

The path of table `shop.orders` is `shop/orders`. Every byte of a source name that is unsafe in a path or column name
becomes an escape character and two hexadecimal digits. Different names stay different, and the escapes are reversible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from cdc.errors import InvalidDefinition

PATH_ESCAPE: Final = "~"
"""Escape character in paths; not `%`, because delta-rs would decode `%41` in a URI and Hadoop's Path would not."""
COLUMN_ESCAPE: Final = "%"
"""Escape character in names of Delta columns."""

POSITION_COLUMN: Final = "_position"
"""Delta column: position of the change that wrote the row, int64."""
ORDINAL_COLUMN: Final = "_ordinal"
"""Delta column: ordinal of the change that wrote the row, int64."""
RELATION_COLUMN: Final = "_relation"
"""Delta column of a target shared by several tables: the log's number of the row's table, int64."""
OP_COLUMN: Final = "_op"
"""Delta column of an append target: the operation code of the change, string."""
COMMITTED_COLUMN: Final = "_committed_at"
"""Delta column of append and soft-delete targets: commit time of the row's change, timestamp."""
GENERATION_COLUMN: Final = "_generation"
"""Delta column of an append target: in a row with operation `g`, the start position of the full copy, int64."""
DELETED_COLUMN: Final = "_deleted"
"""Delta column of a soft-delete target: whether the row was deleted at the source, boolean."""
START_COLUMN: Final = "__START_AT"
"""Delta column of an SCD2 target: position of the transaction that started the version, int64."""
END_COLUMN: Final = "__END_AT"
"""Delta column of an SCD2 target: position of the transaction that ended the version, int64; null until then."""
FROM_COLUMN: Final = "_valid_from"
"""Delta column of an SCD2 target: commit time of the transaction at `__START_AT`, timestamp."""
TO_COLUMN: Final = "_valid_to"
"""Delta column of an SCD2 target: commit time of the transaction at `__END_AT`, timestamp; null until then."""

COLUMN_ID_KEY: Final = b"cdc.column_id"
"""Key of Arrow field metadata: the log's column id in decimal; a column keeps its id when it is renamed."""

_PATH_SAFE: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")
_PLACEHOLDER: Final = re.compile(r"\{[a-z]+\}")


def path_segment(name: str) -> str:
    """Return the path segment for the name of a schema or table; different names give different segments.

    Upper case is escaped because some file systems ignore case. A leading underscore is escaped because Spark ignores
    such a folder. Raises ValueError for an empty name.
    """
    if not name:
        raise ValueError("the name of a schema or table is empty")
    return "".join(
        char if char in _PATH_SAFE and not (index == 0 and char == "_") else _escaped(char, PATH_ESCAPE)
        for index, char in enumerate(name)
    )


def name_of_segment(segment: str) -> str:
    """Return the name of the schema or table for a path segment; the inverse of `path_segment`."""
    return _unescaped(segment, PATH_ESCAPE)


def column_name(name: str) -> str:
    """Return the Delta column for a source column: characters other than letters, digits and `_` are escaped.

    Delta rejects ` ,;{}()` and control characters; SQL dialects split names at dots and quotes. A leading
    underscore is escaped because cdc's own columns begin with one (`_position`, `_ordinal`). Raises ValueError for an
    empty name.
    """
    if not name:
        raise ValueError("the name of a column is empty")
    return "".join(
        char if char.isalnum() or (char == "_" and index > 0) else _escaped(char, COLUMN_ESCAPE)
        for index, char in enumerate(name)
    )


def name_of_column(column: str) -> str:
    """Return the name of the source column for the name of a Delta column; the inverse of `column_name`."""
    return _unescaped(column, COLUMN_ESCAPE)


def target_uri(template: str, schema: str, table: str, more: Mapping[str, str] | None = None) -> str:
    """Return the URI of a table's target.

    The sink's path template can contain the placeholders `{schema}` and `{table}`. `more` maps the names of further
    placeholders to their values. Raises InvalidDefinition if the template contains another placeholder.
    """
    named = {"schema": schema, "table": table, **(more or {})}
    segments = {f"{{{name}}}": path_segment(text) for name, text in named.items()}

    def filled(match: re.Match[str]) -> str:
        if match.group() not in segments:
            raise InvalidDefinition(
                f"unknown placeholder {match.group()!r} in path {template!r}: expected {{schema}} or {{table}}"
            )
        return segments[match.group()]

    return _PLACEHOLDER.sub(filled, template)


def published_uri(template: str, *, with_tables: bool = False) -> str:
    """Return the URI of the Delta table with a sink's published cuts, for the sink's path template.

    The table is in the deepest folder without a placeholder: `lake/{schema}/{table}` → `lake/_cdc/published`.
    with_tables: whether it is a sink of views that writes into the folder of a sink of tables; its record is in
    `lake/_cdc/views/published`.
    """
    fixed = _PLACEHOLDER.split(template, maxsplit=1)[0]
    root = fixed if fixed == template else fixed.rpartition("/")[0]
    folder = f"{root.rstrip('/')}/_cdc" if root or fixed.startswith("/") else "_cdc"
    record = f"{folder}/published"
    return record_of_views(record) if with_tables else record


def record_of_views(record: str) -> str:
    """Return the URI of the published cuts of the views that are next to the tables of a sink.

    record: URI of the published cuts of the sink of tables.
    """
    folder, _, name = record.rpartition("/")
    return f"{folder}/views/{name}"


def parked_uri(record: str) -> str:
    """Return the URI of the Delta table with a sink's parked rows.

    record: URI of the Delta table with the published cuts of the sink, or with those of a replay.
    """
    folder, _, name = record.rpartition("/")
    # the record of a replay is removed together with everything whose name begins with its name
    return f"{folder}/parked" if name == "published" else f"{record}-parked"


def _escaped(char: str, sign: str) -> str:
    return "".join(f"{sign}{byte:02X}" for byte in char.encode())


def _unescaped(text: str, sign: str) -> str:
    escapes = re.compile(f"(?:{sign}[0-9A-F]{{2}})+".encode())
    return escapes.sub(lambda m: bytes.fromhex(m.group().decode().replace(sign, "")), text.encode()).decode()
