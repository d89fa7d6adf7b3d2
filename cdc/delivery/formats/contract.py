"""Contract of a format: what encodes the changes of one table, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from cdc.delivery.formats.connect_schema import SchemaPair
from cdc.delivery.formats.table_changes import TableChanges, TransactionNumbers
from cdc.errors import CdcError

Headers = tuple[tuple[str, bytes], ...]
"""Names and values of the headers of an event, in order."""
TOMBSTONE: Final = "/tombstone"
"""Suffix of the id of a tombstone, which has the position and ordinal of the delete before it."""


@dataclass(frozen=True, slots=True)
class LogicalMessages:
    """Logical messages of one topic, in log order."""

    topic: str
    rows: pa.Table
    """The log rows, with the columns of LOG_SCHEMA and one chunk per column."""
    numbers: TransactionNumbers | None = None
    """Numbers in the transactions; None if the delivery does not send them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedEvents:
    """Encoded events of some changes. Every array has one entry per event; a change has none, one or several events."""

    source: np.ndarray
    """Index of the change of each event; never decreases."""
    suffixes: list[str] | None = None
    """Suffix of each event's id, TOMBSTONE or empty; None if all are empty. The events of one change differ in it."""
    keys: pa.Array
    """Content of the key; null for an event without key. The type is string or binary, or large if there is more than
    2 GiB."""
    values: pa.Array
    """Content, of one of the same types; null for a tombstone."""
    headers: list[Headers] | None = None
    """Headers of each event; None if no event has headers of its own."""
    refused: dict[int, CdcError] = field(default_factory=dict)
    """Index of a change that cannot be encoded → the reason; it has no events."""


class Format(Protocol):
    """Encoding of changes as events.

    Formats with a schema registry raise errors with Reaction.RETRY if the registry does not take a schema. Then no
    event of the call was encoded, and the same call can be made again.
    """

    def encode(self, changes: TableChanges) -> EncodedEvents:
        """Encode changes of one table. Rows without events in this format (`s`, `g`) have none.

        Both rows of a key change, the `d` row and the `u` row with `old_key`, must be in the same call: the events name
        each other's keys.
        """

    def encode_messages(self, messages: LogicalMessages) -> EncodedEvents:
        """Encode logical messages, which are rows with the operation `m`."""


@runtime_checkable
class EncodesRecords(Protocol):
    """A format that also writes events that are no changes, such as the begin of a transaction."""

    def record(self, topic: str, schemas: SchemaPair, key: str, value: str) -> tuple[bytes, bytes]:
        """Return key and value of an event from their JSON; raises what `encode` raises."""
