"""A format for tests: one event per change, whose content names operation, key and row."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from cdc.delivery.formats.contract import EncodedEvents, LogicalMessages
from cdc.delivery.formats.table_changes import TableChanges
from cdc.errors import CdcError, EventNotEncodable


class PlainFormat:
    """Encodes `[op, key, {column: text}]`; a row with one of the texts `refused` cannot be encoded."""

    def __init__(self, refused: frozenset[str] = frozenset()) -> None:
        self.refused = refused

    def encode(self, changes: TableChanges) -> EncodedEvents:
        """One event per change."""
        keys = [list(key) for key in zip(*(part.to_pylist() for part in changes.key), strict=True)]
        keys = keys or [[] for _ in range(changes.count)]
        contents = [self._image(changes, number) for number in range(changes.count)]
        refused: dict[int, CdcError] = {
            number: EventNotEncodable("refused")
            for number, content in enumerate(contents)
            if self.refused & set(content.values())
        }
        source = np.array([n for n in range(changes.count) if n not in refused], dtype=np.int64)
        operations = changes.array("op").to_pylist()
        return EncodedEvents(
            source=source,
            keys=pa.array([json.dumps(keys[n]) for n in source], pa.string()),
            values=pa.array([json.dumps([operations[n], keys[n], contents[n]]) for n in source], pa.string()),
            refused=refused,
        )

    def encode_messages(self, messages: LogicalMessages) -> EncodedEvents:
        """The payload of each message."""
        count = messages.rows.num_rows
        return EncodedEvents(
            source=np.arange(count), keys=pa.nulls(count, pa.string()), values=messages.rows["payload"].combine_chunks()
        )

    @staticmethod
    def _image(changes: TableChanges, number: int) -> Mapping[str, str | None]:
        image = changes.after if changes.after.exists[number] else changes.before
        found: dict[str, str | None] = {}
        for column in changes.columns:
            values = image.columns[column.id]
            if image.exists[number] and (values.unsent is None or not values.unsent[number]):
                found[column.name] = values.texts[number].as_py()
        return found
