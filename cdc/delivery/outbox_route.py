"""The outbox: rows that an application inserts into one table are events; their content is not a change but the payload
column, and topic, key and headers come from other columns of the row.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.deliveries import Outbox
from cdc.delivery.formats.contract import EncodedEvents, Headers
from cdc.delivery.formats.table_changes import TableChanges, table_changes
from cdc.errors import TransformFailed
from cdc.log_row import Operation
from cdc.table import Column, TableSchema

_BYTEA: Final = 17
_INSERTED: Final = pa.array([Operation.CREATE.value, Operation.READ.value])
"""Operations of rows that are events; an application usually deletes the row again, which is no event."""


class OutboxRoute:
    """The route of one version of the outbox table. Raises TransformFailed if a column of the definition is missing."""

    def __init__(self, schema: TableSchema, outbox: Outbox, pipeline: str) -> None:
        self._schema = schema
        self._type, self._key = self._column(outbox.type), self._column(outbox.key)
        self._payload = self._column(outbox.payload)
        self._headers = {"id": self._column(outbox.id)}
        if outbox.event_type is not None:
            self._headers["eventType"] = self._column(outbox.event_type)
        self._headers |= {name: self._column(column) for name, column in outbox.headers.items()}
        self._topic, self._pipeline = outbox.topic, pipeline

    def encode(self, rows: pa.Table) -> tuple[list[str], EncodedEvents]:
        """Return the topic of each event, and the events. rows: log rows of the outbox table."""
        kept = np.flatnonzero(pc.is_in(rows["op"], _INSERTED).to_numpy(zero_copy_only=False))
        changes = table_changes(self._schema, "", rows.take(pa.array(kept)))
        values = self._texts(changes, self._payload)
        if self._payload.value_type[0] == _BYTEA:
            binary = [None if text is None else bytes.fromhex(text[2:]) for text in values.to_pylist()]
            values = pa.array(binary, pa.binary())
        types = self._texts(changes, self._type).to_pylist()
        named = {one: self._topic.format(pipeline=self._pipeline, type=one) for one in set(types)}
        texts = [self._texts(changes, column).to_pylist() for column in self._headers.values()]
        headers: list[Headers] = [
            tuple((name, text.encode()) for name, text in zip(self._headers, row, strict=True) if text is not None)
            for row in zip(*texts, strict=True)
        ]
        events = EncodedEvents(source=kept, keys=self._texts(changes, self._key), values=values, headers=headers)
        return [named[one] for one in types], events

    @staticmethod
    def _texts(changes: TableChanges, column: Column) -> pa.StringArray:
        return changes.after.columns[column.id].texts

    def _column(self, name: str) -> Column:
        column = self._schema.column(name)
        if column is None or column.generated:
            raise TransformFailed(
                f"outbox table {self._schema.topic!r} has no column {name!r}",
                remedy="correct the column names in 'outbox' of the delivery",
            )
        return column
