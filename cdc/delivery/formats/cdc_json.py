"""Format `cdc`: the complete change as JSON, without loss.

Every event has the same members: `position`, `ordinal`, `op`, `topic` (the source table), `xid`, `committed_at`, `key`,
`old_key`, `before`, `after` and `unchanged`. `key` and `old_key` map the key columns to values, and are null for a
change without them. An image has the columns that Postgres sent; `unchanged` names the columns of `after` that it did
not send.

A value is the text that Postgres sent, as a JSON string, so nothing is rounded. Only smallint, integer and oid are JSON
numbers, and boolean is `true` or `false`: each JSON parser reads these exactly. A bigint is a string.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.deliveries import DeliverySettings, EventEncoding
from cdc.delivery.formats import json_values
from cdc.delivery.formats.connect_schema import ConnectSchema, SchemaPair, optional, scalar, struct
from cdc.delivery.formats.contract import EncodedEvents, LogicalMessages
from cdc.delivery.formats.event_rows import JsonRows, MessageColumns, SourceNames, assemble, message_columns
from cdc.delivery.formats.table_changes import Image, ImageColumn, TableChanges
from cdc.json_arrays import Pieces, concatenated, listed, members, or_null, quote, quoted, quoted_pieces
from cdc.table import Column, TableSchema

_NUMBERS: Final = frozenset({21, 23, 26})
"""Type OIDs of int2, int4 and oid."""
_BOOLEAN: Final = 16


JsonValues = Callable[[Column, pa.StringArray], Pieces]
"""Conversion of the texts of a column to pieces of JSON values; null becomes `null`."""
_COLUMNS: Final = ConnectSchema(type="map", keys=scalar("string"), items=optional("string"))
CHANGE: Final = struct(
    "cdc.Change",
    (
        ("position", scalar("string")),
        ("ordinal", scalar("int64")),
        ("op", scalar("string")),
        ("topic", scalar("string")),
        ("xid", scalar("int64")),
        ("committed_at", scalar("string")),
        ("key", _COLUMNS.as_optional()),
        ("old_key", _COLUMNS.as_optional()),
        ("before", _COLUMNS.as_optional()),
        ("after", _COLUMNS.as_optional()),
        ("unchanged", ConnectSchema(type="array", items=scalar("string"))),
    ),
)
"""Schema of a change whose values are all text."""
MESSAGE: Final = struct(
    "cdc.Message",
    (
        ("position", scalar("string")),
        ("ordinal", scalar("int64")),
        ("op", scalar("string")),
        ("xid", scalar("int64")),
        ("committed_at", scalar("string")),
        ("lsn", scalar("int64")),
        ("prefix", optional("string")),
        ("transactional", optional("boolean")),
        ("content", scalar("bytes")),
    ),
)
"""Schema of a logical message."""


class CdcFormat:
    """Encoding as complete changes."""

    def __init__(self, settings: DeliverySettings, names: SourceNames) -> None:
        del names
        # a schema that is the same for all tables has only strings
        self._values = exact_values if settings.encoding is EventEncoding.JSON else _strings

    def encode(self, changes: TableChanges) -> EncodedEvents:
        """Encode changes of one table."""
        rows = JsonRows(changes.rows)
        keys, pieces = cdc_change(rows, changes, self._values)
        return assemble((keys, concatenated(pieces)), rows.is_change(), {})

    def schemas(self, schema: TableSchema, topic: str) -> SchemaPair:
        """Return the schemas of keys and values of a table's events."""
        del schema, topic
        return _COLUMNS, CHANGE

    def message_schemas(self) -> SchemaPair:
        """Return the schemas of keys and values of logical messages."""
        return _COLUMNS, MESSAGE

    def encode_messages(self, messages: LogicalMessages) -> EncodedEvents:
        """Encode logical messages."""
        rows = JsonRows(messages.rows)
        keys, pieces = cdc_message(rows, message_columns(rows))
        return assemble((keys, concatenated(pieces)), np.ones(rows.count, dtype=bool), {})


def cdc_change(rows: JsonRows, changes: TableChanges, values: JsonValues) -> tuple[pa.StringArray, Pieces]:
    """Return keys and the pieces of the values; a key is null for a change without one.

    values: how the texts of a column become JSON values.
    """
    keys = _key(changes, changes.key, values)
    return keys, [
        *_beginning(rows),
        rows.once_per_transaction(partial(_middle, changes.schema.topic)),
        or_null(keys),
        ',"old_key":',
        or_null(_key(changes, changes.old_key, values)),
        ',"before":',
        *_image(changes.columns, changes.before, values),
        ',"after":',
        *_image(changes.columns, changes.after, values),
        ',"unchanged":[',
        *_unsent_names(changes),
        "]}",
    ]


def cdc_message(rows: JsonRows, message: MessageColumns) -> tuple[pa.StringArray, Pieces]:
    """Return keys and the pieces of the values of logical messages."""
    prefixes = or_null(quoted(message.prefixes))
    contents = [b64encode(content).decode() for content in message.contents.to_pylist()]
    return concatenated(['{"prefix":', prefixes, "}"]), [
        *_beginning(rows),
        ',"xid":',
        rows.xids(),
        ',"committed_at":"',
        rows.commit_times(),
        '","lsn":',
        message.lsns,
        ',"prefix":',
        prefixes,
        ',"transactional":',
        or_null(message.transactional),
        ',"content":"',
        pa.array(contents, pa.string()),
        '"}',
    ]


def _beginning(rows: JsonRows) -> Pieces:
    return ['{"position":"', rows.positions(), '","ordinal":', rows.ordinals(), ',"op":"', rows.array("op"), '"']


def _middle(topic: str, rows: JsonRows) -> pa.StringArray:
    times = rows.commit_times()
    return concatenated([f',"topic":{quote(topic)},"xid":', rows.xids(), ',"committed_at":"', times, '","key":'])


def exact_values(column: Column, texts: pa.StringArray) -> Pieces:
    """Return texts as numbers and booleans where each JSON parser reads these exactly, and as strings otherwise."""
    oid = column.value_type[0]
    if oid == _BOOLEAN:
        values = json_values.booleans(texts)
    elif oid in _NUMBERS:
        values = json_values.integers(texts)
    else:
        return quoted_pieces(texts)
    # a masked value is no number
    return [or_null(pc.coalesce(values, quoted(texts)) if values.null_count > texts.null_count else values)]


def _strings(column: Column, texts: pa.StringArray) -> Pieces:
    del column
    return quoted_pieces(texts)


def _key(changes: TableChanges, parts: Sequence[pa.StringArray], values: JsonValues) -> pa.StringArray:
    valid = [part.is_valid().to_numpy(zero_copy_only=False) for part in parts]
    exists = np.logical_or.reduce(valid) if valid else np.array(False)
    if not exists.any():
        return pa.nulls(changes.count, pa.string())
    named = zip(changes.schema.key, parts, strict=True)
    content = members((column.name, values(column, texts)) for column, texts in named)
    return pc.if_else(pa.array(exists), concatenated(content), None)


def _image(columns: Sequence[Column], image: Image, values: JsonValues) -> Pieces:
    absent = len(image.exists) - int(np.count_nonzero(image.exists))
    if absent == len(image.exists):
        return ["null"]
    found = [(column, image.columns[column.id]) for column in columns]
    if absent:
        found = [(column, _without_nulls(known, absent)) for column, known in found]
    if any(known.unsent is not None for _, known in found):
        sent: list[pa.Array] = []
        for column, known in found:
            member = concatenated([f"{quote(column.name)}:", *values(column, known.texts)])
            sent.append(member if known.unsent is None else pc.if_else(pa.array(known.unsent), None, member))
        pieces: Pieces = ["{", listed(sent), "}"]
    else:
        pieces = members((column.name, values(column, known.texts)) for column, known in found)
    return [pc.if_else(pa.array(image.exists), concatenated(pieces), "null")] if absent else pieces


def _without_nulls(column: ImageColumn, absent: int) -> ImageColumn:
    """Return the column with empty texts for changes without this image, if it has no other nulls.

    Texts without nulls are encoded faster, and these ones are not used. absent: number of changes without the image
    """
    return replace(column, texts=pc.fill_null(column.texts, "")) if column.texts.null_count == absent else column


def _unsent_names(changes: TableChanges) -> Pieces:
    names = [
        pc.if_else(pa.array(values.unsent), quote(column.name), None)
        for column in changes.columns
        if (values := changes.after.columns[column.id]).unsent is not None
    ]
    return [listed(names)] if names else []
