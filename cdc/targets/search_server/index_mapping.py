"""Index mapping: the settings and fields of a table's index, from the table's schema and the definition.

Every document has `_position`, the position of the change that wrote it, and `_deleted` if the row was deleted. A
deleted row stays as a document without columns, because a server forgets the version of a deleted document after
`index.gc_deletes` (one minute by default), and a delayed request could then write an older version again. The alias of
a table shows neither these documents nor rows that a truncate or a full copy removed: their positions are below the
floor of the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from cdc.table import Column
from cdc.target_names import DELETED_COLUMN, POSITION_COLUMN, column_name
from cdc.targets.search_server.document_values import LONGEST_TERM, RAW_FIELD, ValueKind, ValueType, value_type

META: Final = "cdc"
"""Key of the mapping's `_meta` that says to whom the index belongs, and which columns its documents have."""
UNUSED_SINCE: Final = "unused_since"
"""Key in META: time at which the index lost its alias, in seconds since 1970; it says nothing about an index in use."""
_IGNORED: Final = {"ignore_malformed": True}
_JSON_TYPE: Final = {"opensearch": "flat_object", "elasticsearch": "flattened"}
_WORDS: Final = {"type": "text", "fields": {"keyword": {"type": "keyword", "ignore_above": LONGEST_TERM}}}
_FIELDS: Final[Mapping[ValueKind, Mapping[str, Any]]] = {
    ValueKind.BOOLEAN: {"type": "boolean"},
    ValueKind.INTEGER: {"type": "long", **_IGNORED},
    ValueKind.NUMBER: {"type": "double", **_IGNORED},
    ValueKind.DATE: {"type": "date", **_IGNORED},
    ValueKind.TIMESTAMP: {"type": "date", **_IGNORED},
    ValueKind.MOMENT: {"type": "date", **_IGNORED},
    ValueKind.BYTES: {"type": "binary"},
    ValueKind.POINT: {"type": "geo_point", **_IGNORED},
    ValueKind.WORDS: _WORDS,
    ValueKind.EXACT: {"type": "keyword", "ignore_above": LONGEST_TERM},
}


Overrides = Mapping[str, str | Mapping[str, Any]]
"""Column → field type, or mapping of the field, as the definition sets it."""


@dataclass(frozen=True, slots=True)
class DocumentColumn:
    """A column of the documents of an index."""

    id: int
    name: str
    """Name of the column, before characters were escaped for the field."""
    type: ValueType

    @property
    def field(self) -> str:
        """The field of the documents that has the values of the column."""
        return column_name(self.name)

    def to_json(self) -> list[Any]:
        """Return the column as the `_meta` of an index has it."""
        return [self.id, self.name, str(self.type)]

    @classmethod
    def from_json(cls, parts: Sequence[Any]) -> Self:
        """Return the column that `to_json` described."""
        return cls(parts[0], parts[1], ValueType.parse(parts[2]))


def document_columns(columns: Iterable[Column], overrides: Overrides) -> tuple[DocumentColumn, ...]:
    """Return the columns of the documents that have values of these columns of the table."""
    return tuple(
        DocumentColumn(column.id, column.name, value_type(column, _override(column.name, overrides).get("type")))
        for column in columns
    )


def field_types(columns: Iterable[DocumentColumn], overrides: Overrides, engine: str) -> dict[str, dict[str, Any]]:
    """Return field → its mapping."""
    return {column.field: _field(column, overrides, engine) for column in columns}


def visible(floor: int) -> dict[str, Any]:
    """Return the query that matches the current rows of an index."""
    return {
        "bool": {
            "must_not": [{"term": {DELETED_COLUMN: True}}],
            "filter": [{"range": {POSITION_COLUMN: {"gte": floor}}}],
        }
    }


def index_body(
    fields: Mapping[str, Any], meta: Mapping[str, Any], settings: Mapping[str, Any], mappings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body with which an index is created.

    settings, mappings: additions of the definition; they take precedence, except over fields of cdc's own.
    """
    own = {
        POSITION_COLUMN: {"type": "long"},
        DELETED_COLUMN: {"type": "boolean"},
        RAW_FIELD: {"type": "object", "enabled": False},
    }
    properties = {**fields, **mappings.get("properties", {}), **own}
    index = {"number_of_shards": 1, "refresh_interval": "-1", **settings}
    return {
        "settings": {"index": index},
        "mappings": {"dynamic": False, **mappings, "properties": properties, "_meta": {META: dict(meta)}},
    }


def owner_of(mappings: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the id of the log and the name of the sink to which an index belongs; None for an index of no sink.

    mappings: the mapping of the index.
    """
    meta = mappings.get("_meta", {}).get(META, {})
    return meta.get("log_id"), meta.get("sink")


def _field(column: DocumentColumn, overrides: Overrides, engine: str) -> dict[str, Any]:
    override, kind = _override(column.name, overrides), column.type.kind
    own = {"type": _JSON_TYPE[engine]} if kind is ValueKind.JSON else _FIELDS[kind]
    # another type may not have the parameters of the usual one
    return {**({} if override.get("type") else own), **override}


def _override(column: str, overrides: Overrides) -> dict[str, Any]:
    override = overrides.get(column, {})
    return {"type": override} if isinstance(override, str) else dict(override)
