"""Document rows: turns the documents of an index into rows with the texts that Postgres printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from cdc.position import Position
from cdc.table import Column, TableSchema
from cdc.target_names import POSITION_COLUMN
from cdc.targets.published_record import TableRecord
from cdc.targets.search_index_reader import FoundRow
from cdc.targets.search_server.document_values import RAW_FIELD, ValueKind, ValueType, to_text
from cdc.targets.search_server.index_mapping import META, DocumentColumn

_SORTED: Final = frozenset({"byte", "short", "integer", "long", "float", "double", "keyword"})
"""Field types whose sort values the server accepts again as the beginning of the next page."""
_TEXT: Final = ValueType(ValueKind.WORDS)
_WORDS: Final = frozenset({ValueKind.WORDS, ValueKind.EXACT})


@dataclass(frozen=True, slots=True)
class ShownTable:
    """How the documents of a table become rows."""

    topic: str
    columns: Sequence[DocumentColumn]
    key: Sequence[int]
    """Ids of the key columns, in their order."""
    missing: Mapping[int, str | None]
    """Column id → value in documents that are older than the column."""
    rules: str
    """cdc.config.search_sink.search_fingerprint of the rules under which the documents were written."""
    order: Sequence[Mapping[str, str]]
    """Sort of a search: best match first, then by the key; the last criterion is unique in each shard."""
    types: Mapping[str, Column]
    """Name in the rows → the column of the source whose type the values have; others, such as masked ones, are text."""

    @classmethod
    def of(cls, table: TableRecord, mapping: Mapping[str, Any]) -> Self:
        """Return how the documents of a table become rows. mapping: the mapping of its index."""
        meta, schema = mapping["_meta"][META], TableSchema.from_json(table.schema or "")
        columns = [DocumentColumn.from_json(parts) for parts in meta["columns"]]
        fields, key = {column.id: column.field for column in columns}, meta["key"]
        sorted_key = [{name: "asc"} for id_ in key for name in _sort_fields(fields[id_], mapping["properties"])]
        order = [{"_score": "desc"}, *sorted_key, {"_seq_no": "asc"}]
        sent = {column.id: column for column in schema.sent}
        return cls(
            table.topic,
            columns,
            key,
            {id_: column.missing for id_, column in sent.items()},
            meta["rules"],
            order,
            # the documents have a masked column as text, whatever its type at the source
            {column.name: sent[column.id] for column in columns if column.id in sent and column.type != _TEXT},
        )

    @property
    def searched(self) -> list[str]:
        """The fields whose words are searched."""
        return [column.field for column in self.columns if column.type.kind in _WORDS]

    def row(self, hit: Mapping[str, Any]) -> FoundRow:
        """Return the row of a document."""
        # unusual JSON values take the place of the null in the field of their column
        source, missing = {**hit["_source"], **hit["_source"].get(RAW_FIELD, {})}, self.missing
        texts = {
            column.id: to_text(source[column.field], column.type) if column.field in source else missing.get(column.id)
            for column in self.columns
        }
        return FoundRow(
            topic=self.topic,
            key=tuple(texts[column] for column in self.key),
            position=Position(int(source[POSITION_COLUMN])),
            source={column.name: texts[column.id] for column in self.columns},
            score=float(hit.get("_score") or 0.0),
        )


def _sort_fields(field: str, properties: Mapping[str, Any]) -> list[str]:
    """Return the field that sorts by a column: the field itself or its part `keyword`; nothing if neither can."""
    mapping = properties.get(field, {})
    if mapping.get("type") in _SORTED:
        return [field]
    return [f"{field}.keyword"] if "keyword" in mapping.get("fields", {}) else []
