"""Format `cloudevents`: CloudEvents 1.0 in structured mode, with the format `cdc` as content.

Section 3 of the JSON event format of CloudEvents says what the members mean. The `id` is that of the event, the
`source` is `/cdc/PIPELINE`, the `subject` is the source table, or the prefix of a logical message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final
from urllib.parse import quote as percent_encoded

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.deliveries import DeliverySettings
from cdc.delivery.formats.cdc_json import cdc_change, cdc_message, exact_values
from cdc.delivery.formats.contract import EncodedEvents, LogicalMessages
from cdc.delivery.formats.event_rows import JsonRows, SourceNames, assemble, message_columns
from cdc.delivery.formats.table_changes import TableChanges
from cdc.json_arrays import concatenated, quote, quoted

CONTENT_TYPE: Final = ("content-type", b"application/cloudevents+json; charset=UTF-8")
"""Header of each event, as the protocol bindings of CloudEvents require it."""


class CloudEventsFormat:
    """Encoding as CloudEvents."""

    def __init__(self, settings: DeliverySettings, names: SourceNames) -> None:
        del settings
        self._log_id = names.log_id
        self._source = quote(f"/cdc/{percent_encoded(names.pipeline)}")

    def encode(self, changes: TableChanges) -> EncodedEvents:
        """Encode changes of one table."""
        rows = JsonRows(changes.rows)
        keys, pieces = cdc_change(rows, changes, exact_values)
        value = self._enclosed(rows, [f',"subject":{quote(changes.schema.topic)}'], pieces)
        return _with_content_type(assemble((keys, value), rows.is_change(), {}))

    def encode_messages(self, messages: LogicalMessages) -> EncodedEvents:
        """Encode logical messages."""
        rows = JsonRows(messages.rows)
        columns = message_columns(rows)
        keys, pieces = cdc_message(rows, columns)
        # a subject may not be empty
        prefixes = pc.if_else(pc.equal(columns.prefixes, ""), None, columns.prefixes)
        subject = pc.fill_null(concatenated([',"subject":', quoted(prefixes)]), "")
        value = self._enclosed(rows, [subject], pieces)
        return _with_content_type(assemble((keys, value), np.ones(rows.count, dtype=bool), {}))

    def _enclosed(self, rows: JsonRows, subject: list[pa.Array | str], content: list[pa.Array | str]) -> pa.StringArray:
        return concatenated(
            [
                '{"specversion":"1.0","id":"',
                rows.event_ids(self._log_id),
                f'","source":{self._source},"type":"cdc.',
                rows.array("op"),
                '"',
                *subject,
                ',"time":"',
                rows.commit_times(),
                '","datacontenttype":"application/json","data":',
                *content,
                "}",
            ]
        )


def _with_content_type(events: EncodedEvents) -> EncodedEvents:
    return replace(events, headers=[(CONTENT_TYPE,)] * len(events.source))
