"""Rows and keys of one table as JSON in Debezium's representation, with the schemas that describe them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.deliveries import DebeziumSettings
from cdc.delivery.formats.connect_schema import ConnectSchema, key_schema, row_schema
from cdc.delivery.formats.debezium_types import ColumnEncoding, column_encoding
from cdc.delivery.formats.event_rows import Refusals
from cdc.delivery.formats.table_changes import ImageColumn, TableChanges
from cdc.json_arrays import concatenated, members, or_null
from cdc.log_row import Operation
from cdc.table import Column, TableSchema

JsonPieces = list[pa.Array | str]
"""Pieces of a JSON value, for `concatenated`."""
NamedValues = list[tuple[str, pa.Array | str]]
"""Members of a JSON object: (name, value) pairs."""
NO_SCHEMA: Final[tuple[str, str]] = ("", "")
"""What encloses a payload that has no schema."""


class DebeziumTable:
    """Representation of the rows of one table under one version of its schema, for one topic."""

    def __init__(self, schema: TableSchema, topic: str, settings: DebeziumSettings) -> None:
        self.schema = schema
        self.topic = topic
        encodings = {column.id: column_encoding(column, settings) for column in schema.sent}
        self._columns = [(column, encodings[column.id]) for column in schema.sent]
        self._key = [(column, column_encoding(column, settings)) for column in schema.key]
        self.key_schema: ConnectSchema = key_schema(topic, _fields(self._key))
        self.row_schema: ConnectSchema = row_schema(topic, _fields(self._columns))
        self._key_frame = schema_frame(self.key_schema) if settings.schemas else NO_SCHEMA

    def keys(self, changes: TableChanges, parts: tuple[pa.StringArray, ...], refusals: Refusals) -> pa.StringArray:
        """Return the keys with these texts of the key columns; null for a change without a key."""
        if not parts:
            return pa.nulls(changes.count, pa.string())
        exists = _any_valid(parts)
        if not exists.any():
            return pa.nulls(changes.count, pa.string())
        values = [
            (column.name, _values(column, encoding, ImageColumn(texts), None, refusals))
            for (column, encoding), texts in zip(self._key, parts, strict=True)
        ]
        start, end = self._key_frame
        return pc.if_else(pa.array(exists), concatenated([start, *members(values), end]), None)

    def after(self, changes: TableChanges, refusals: Refusals) -> JsonPieces:
        """Return the image `after`, or `null`. An unsent value comes from `before`, or is a placeholder."""
        exists = changes.after.exists
        return _object(exists, self._after(changes, refusals)) if exists.any() else ["null"]

    def before(self, changes: TableChanges, wanted: np.ndarray, refusals: Refusals) -> JsonPieces:
        """Return the image `before`, or `null`; wanted: changes that have it if the log has it.

        A column that was not sent is null, or the default or zero of its type if the column is NOT NULL. A delete
        whose image the log does not have gets its key columns.
        """
        exists = (changes.before.exists & wanted) | _from_key(changes)
        return _object(exists, self._before(changes, refusals)) if exists.any() else ["null"]

    def rows(self, changes: TableChanges, refusals: Refusals) -> JsonPieces:
        """Return `before` of deletes and `after` of other changes, without the brace at the end."""
        after = members(self._after(changes, refusals))[:-1]
        is_delete = _is_delete(changes)
        if not is_delete.any():
            return after
        before = members(self._before(changes, refusals))[:-1]
        return [pc.if_else(pa.array(is_delete), concatenated(before), concatenated(after))]

    def _after(self, changes: TableChanges, refusals: Refusals) -> NamedValues:
        return [
            (column.name, _values(column, encoding, _known_after(changes, column), encoding.unavailable, refusals))
            for column, encoding in self._columns
        ]

    def _before(self, changes: TableChanges, refusals: Refusals) -> NamedValues:
        from_key = _from_key(changes)
        parts = {column.id: texts for column, texts in zip(self.schema.key, changes.key, strict=True)}
        values: NamedValues = []
        for column, encoding in self._columns:
            known = changes.before.columns[column.id]
            if from_key.any():
                known = _with_key(known, from_key, parts.get(column.id))
            absent = (encoding.schema.default or encoding.fallback) if column.not_null else "null"
            values.append((column.name, _values(column, encoding, known, absent, refusals)))
        return values


def _fields(columns: list[tuple[Column, ColumnEncoding]]) -> tuple[tuple[str, ConnectSchema], ...]:
    """Return the fields of a row; the number of a field is the id of its column, which outlives a rename."""
    return tuple((column.name, replace(encoding.schema, number=column.id)) for column, encoding in columns)


def schema_frame(schema: ConnectSchema) -> tuple[str, str]:
    """Return the texts before and after a payload that has a schema."""
    return f'{{"schema":{schema.to_json()},"payload":', "}"


def _values(
    column: Column, encoding: ColumnEncoding, known: ImageColumn, absent: str | None, refusals: Refusals
) -> pa.StringArray | str:
    """Return the JSON values of a column; absent: value of an unsent column, None if there is none."""
    texts, unsent = known.texts, known.unsent
    if texts.null_count == len(texts):
        if unsent is None:
            return "null"
        values = texts
    else:
        values = encoding.convert(texts)
        if values.null_count > texts.null_count:
            bad = pc.and_(values.is_null(), texts.is_valid()).to_numpy(zero_copy_only=False)
            refusals.add(bad, column.name, f"Debezium has no value of type {column.type_name} for it")
    if unsent is None:
        return or_null(values)
    if absent is None:
        refusals.add(unsent, column.name, f"Debezium has no placeholder for an unsent {column.type_name}")
        absent = "null"
    return absent if unsent.all() else or_null(pc.if_else(pa.array(unsent), absent, values))


def _known_after(changes: TableChanges, column: Column) -> ImageColumn:
    """Return the values of a column in `after`; an unsent value has the value of `before`, if that was sent."""
    after, before = changes.after.columns[column.id], changes.before.columns[column.id]
    if after.unsent is None:
        return after
    is_known = after.unsent & changes.before.exists
    if before.unsent is not None:
        is_known &= ~before.unsent
    if not is_known.any():
        return after
    unsent = after.unsent & ~is_known
    texts = pc.if_else(pa.array(is_known), before.texts, after.texts)
    return ImageColumn(texts, unsent if unsent.any() else None)


def _with_key(known: ImageColumn, from_key: np.ndarray, texts: pa.StringArray | None) -> ImageColumn:
    """Return the values of a column, with the key's text in the changes `from_key`; texts: None for another column."""
    if texts is not None:
        return ImageColumn(pc.if_else(pa.array(from_key), texts, known.texts), known.unsent)
    return ImageColumn(known.texts, from_key if known.unsent is None else known.unsent | from_key)


def _object(exists: np.ndarray, values: NamedValues) -> JsonPieces:
    pieces = members(values)
    return pieces if exists.all() else [pc.if_else(pa.array(exists), concatenated(pieces), "null")]


def _from_key(changes: TableChanges) -> np.ndarray:
    """Return for each change whether it is a delete of which the log has only the key."""
    return _is_delete(changes) & _any_valid(changes.key) & ~changes.before.exists


def _is_delete(changes: TableChanges) -> np.ndarray:
    return pc.equal(changes.array("op"), Operation.DELETE.value).to_numpy(zero_copy_only=False)


def _any_valid(parts: tuple[pa.StringArray, ...]) -> np.ndarray:
    valid = [part.is_valid().to_numpy(zero_copy_only=False) for part in parts]
    return np.logical_or.reduce(valid) if valid else np.array(False)
