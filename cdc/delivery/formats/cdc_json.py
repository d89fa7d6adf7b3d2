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
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.deliveries import DeliverySettings
from cdc.delivery.formats import json_values
from cdc.delivery.formats.contract import EncodedEvents, LogicalMessages
from cdc.delivery.formats.event_rows import JsonRows, MessageColumns, SourceNames, assemble, message_columns
from cdc.delivery.formats.json_arrays import concatenated, listed, members, or_null, quote, quoted
from cdc.delivery.formats.table_changes import Image, TableChanges
from cdc.table import Column

_NUMBERS: Final = frozenset({21, 23, 26})
"""Type OIDs of int2, int4 and oid."""
_BOOLEAN: Final = 16


class CdcFormat:
    """Encoding as complete changes."""

    def __init__(self, settings: DeliverySettings, names: SourceNames) -> None:
        del settings, names

    def encode(self, changes: TableChanges) -> EncodedEvents:
        """Encode changes of one table."""
        rows = JsonRows(changes.rows)
        keys, pieces = cdc_change(rows, changes)
        return assemble((keys, concatenated(pieces)), rows.is_change(), {})

    def encode_messages(self, messages: LogicalMessages) -> EncodedEvents:
        """Encode logical messages."""
        rows = JsonRows(messages.rows)
        keys, pieces = cdc_message(rows, message_columns(rows))
        return assemble((keys, concatenated(pieces)), np.ones(rows.count, dtype=bool), {})


def cdc_change(rows: JsonRows, changes: TableChanges) -> tuple[pa.StringArray, list[pa.Array | str]]:
    """Return keys and the pieces of the values; a key is null for a change without one."""
    keys = _key(changes, changes.key)
    return keys, [
        *_beginning(rows),
        f',"topic":{quote(changes.schema.topic)},"xid":',
        rows.xids(),
        ',"committed_at":"',
        rows.commit_times(),
        '","key":',
        or_null(keys),
        ',"old_key":',
        or_null(_key(changes, changes.old_key)),
        ',"before":',
        *_image(changes.columns, changes.before),
        ',"after":',
        *_image(changes.columns, changes.after),
        ',"unchanged":[',
        *_unsent_names(changes),
        "]}",
    ]


def cdc_message(rows: JsonRows, message: MessageColumns) -> tuple[pa.StringArray, list[pa.Array | str]]:
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


def _beginning(rows: JsonRows) -> list[pa.Array | str]:
    return ['{"position":"', rows.positions(), '","ordinal":', rows.ordinals(), ',"op":"', rows.array("op"), '"']


def _values(column: Column, texts: pa.StringArray) -> pa.StringArray:
    """Return texts as JSON values; null stays null."""
    oid = column.value_type[0]
    if oid == _BOOLEAN:
        values = json_values.booleans(texts)
    elif oid in _NUMBERS:
        values = json_values.integers(texts)
    else:
        return quoted(texts)
    # a masked value is no number
    return pc.coalesce(values, quoted(texts)) if values.null_count > texts.null_count else values


def _key(changes: TableChanges, parts: Sequence[pa.StringArray]) -> pa.StringArray:
    valid = [part.is_valid().to_numpy(zero_copy_only=False) for part in parts]
    exists = np.logical_or.reduce(valid) if valid else np.array(False)
    if not exists.any():
        return pa.nulls(changes.count, pa.string())
    values = [
        (column.name, or_null(_values(column, texts))) for column, texts in zip(changes.schema.key, parts, strict=True)
    ]
    return pc.if_else(pa.array(exists), concatenated(members(values)), None)


def _image(columns: Sequence[Column], image: Image) -> list[pa.Array | str]:
    if not image.exists.any():
        return ["null"]
    known = [(column, image.columns[column.id]) for column in columns]
    if any(values.unsent is not None for _, values in known):
        found: list[pa.Array] = []
        for column, values in known:
            member = concatenated([f"{quote(column.name)}:", or_null(_values(column, values.texts))])
            found.append(member if values.unsent is None else pc.if_else(pa.array(values.unsent), None, member))
        pieces: list[pa.Array | str] = ["{", listed(found), "}"]
    else:
        pieces = members((column.name, or_null(_values(column, values.texts))) for column, values in known)
    return pieces if image.exists.all() else [pc.if_else(pa.array(image.exists), concatenated(pieces), "null")]


def _unsent_names(changes: TableChanges) -> list[pa.Array | str]:
    names = [
        pc.if_else(pa.array(values.unsent), quote(column.name), None)
        for column in changes.columns
        if (values := changes.after.columns[column.id]).unsent is not None
    ]
    return [listed(names)] if names else []
