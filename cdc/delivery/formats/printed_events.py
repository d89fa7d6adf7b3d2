"""Log rows as messages that commands print: in cdc's own format, or as events of a delivery with default options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib.metadata import version
from typing import Any, Final

import numpy as np
import pyarrow as pa

from cdc.config.deliveries import DebeziumSettings, DeliverySettings, EventFormat
from cdc.delivery.formats import new_format
from cdc.delivery.formats.contract import EncodedEvents, LogicalMessages
from cdc.delivery.formats.event_rows import SourceNames
from cdc.delivery.formats.table_changes import table_changes
from cdc.log.json_output_formats import SchemaInForce, messages
from cdc.log_row import Operation
from cdc.table import Column, ReplicaIdentity, TableSchema, split_topic

PrintedMessage = dict[str, Any]
"""A message, to be written as JSON."""
_PART: Final = 1024
"""Number of rows that are converted to Python at once."""


class MessageFormat(StrEnum):
    """Format of a printed change."""

    #: The log row with column names; unchanged TOAST columns are listed by name.
    CDC = "cdc"
    #: Debezium's topic, key, headers and envelope; a tombstone follows each delete.
    DEBEZIUM = "debezium"
    #: Only the row, with `__op`, `__deleted`, `__lsn`, `__source_ts_ms` as ExtractNewRecordState adds; no messages.
    FLAT = "flat"


class PrintedEvents:
    """Converts log rows to messages, part by part; remembers the schemas of the tables."""

    def __init__(
        self, schemas: Mapping[int, TableSchema], form: MessageFormat, *, pipeline: str, database: str
    ) -> None:
        """Begin where `schemas` are in force: relation → schema."""
        self._tables = SchemaInForce(dict(schemas))
        self._form = form
        self._pipeline = pipeline
        # a message has no row, so it is no flat row either
        self._skipped = {Operation.GENERATION, *((Operation.MESSAGE,) if form is MessageFormat.FLAT else ())}
        names = SourceNames(pipeline, database, version("cdc"))
        settings = DeliverySettings(name="printed", format=EventFormat(form.value))
        debezium = DebeziumSettings(schemas=False, tombstones=form is MessageFormat.DEBEZIUM)
        self._format = new_format(settings.model_copy(update={"debezium": debezium}), names)

    def messages(self, rows: pa.Table, operations: frozenset[str] = frozenset()) -> Iterator[PrintedMessage]:
        """Yield the messages of rows in log order; operations: of rows with one of these, empty for all rows."""
        found = self._as_in_log(rows) if self._form is MessageFormat.CDC else self._as_events(rows)
        return (message for op, message in found if not operations or op in operations)

    def _as_in_log(self, rows: pa.Table) -> Iterator[tuple[str, PrintedMessage]]:
        stream = (row for batch in rows.to_batches(max_chunksize=_PART) for row in batch.to_pylist())
        return ((row["op"], message) for row, message in messages(stream, self._tables))

    def _as_events(self, rows: pa.Table) -> Iterator[tuple[str, PrintedMessage]]:
        operations = rows["op"].to_pylist()
        found: list[tuple[int, PrintedMessage]] = []
        for relation, schema, numbers in self._groups(rows, operations):
            part = rows.take(pa.array(numbers)).combine_chunks()
            topic = f"{self._pipeline}.message"
            if relation is None:
                events = self._format.encode_messages(LogicalMessages(topic, part))
            else:
                known = _without_names(relation, part) if schema is None else schema
                topic = f"{self._pipeline}.{known.topic}"
                events = self._format.encode(table_changes(known, topic, part))
            found += self._of_events(events, topic, np.array(numbers))
        # both events of a delete stay in order
        found.sort(key=lambda pair: pair[0])
        return ((operations[number], message) for number, message in found)

    def _groups(self, rows: pa.Table, operations: list[str]) -> list[tuple[int | None, TableSchema | None, list[int]]]:
        """Return the relation, the schema and the numbers of rows; no relation for logical messages."""
        groups: list[tuple[int | None, TableSchema | None, list[int]]] = []
        current: dict[int | None, list[int]] = {}
        payloads, relations = rows["payload"], rows["relation"].to_pylist()
        for number, (relation, operation) in enumerate(zip(relations, operations, strict=True)):
            if operation == Operation.SCHEMA.value:
                self._tables.schemas[relation] = TableSchema.from_json(payloads[number].as_py())
                current.pop(relation, None)
            elif operation not in self._skipped:
                if relation not in current:
                    current[relation] = []
                    groups.append((relation, self._tables.schemas.get(relation), current[relation]))
                current[relation].append(number)
        return groups

    def _of_events(
        self, events: EncodedEvents, topic: str, numbers: np.ndarray
    ) -> Iterator[tuple[int, PrintedMessage]]:
        for index, error in events.refused.items():
            yield int(numbers[index]), {"topic": topic, "error": str(error)}
        headers = events.headers or [()] * len(events.source)
        for index, key, value, added in zip(
            events.source.tolist(), events.keys.to_pylist(), events.values.to_pylist(), headers, strict=True
        ):
            content = None if value is None else json.loads(value)
            message = {
                "topic": topic,
                "key": None if key is None else json.loads(key),
                "headers": {name: json.loads(text) for name, text in added},
                "value": content,
            }
            yield int(numbers[index]), content if self._form is MessageFormat.FLAT and content else message


def _without_names(relation: int, rows: pa.Table) -> TableSchema:
    """Return a schema for rows of a table of which the log has none: a column has the name `column_ID`."""
    images = [image for side in ("before", "after") for image in rows[side].to_pylist() if image is not None]
    schema, name = split_topic(rows["topic"][0].as_py() or "")
    return TableSchema(
        relation=relation,
        oid=relation & 0xFFFFFFFF,
        schema=schema,
        name=name,
        replica_identity=ReplicaIdentity.DEFAULT,
        columns=tuple(
            Column(id=number, name=f"column_{number}", type_oid=25, type_name="text")
            for number in sorted({number for image in images for number, _ in image})
        ),
    )
