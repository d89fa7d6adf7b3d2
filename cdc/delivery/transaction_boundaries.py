"""Records that say where a source transaction begins and ends, as Debezium's `provide.transaction.metadata` sends them.

The record END has the number of events of the transaction: those of tables, per table, and of transactional logical
messages, also those that wait as dead letters. A tombstone is not counted. Rows of a copy belong to no transaction.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa

from cdc.config.deliveries import DeliverySettings, EventFormat
from cdc.delivery.destinations.contract import ID_HEADER, POSITION_HEADER, XID_HEADER, DeliveryIdentity, Event
from cdc.delivery.event_part import EventPart
from cdc.delivery.formats.connect_schema import ConnectSchema, SchemaPair, optional, scalar, struct
from cdc.delivery.formats.contract import EncodesRecords, Format
from cdc.delivery.formats.debezium_rows import NO_SCHEMA, schema_frame
from cdc.delivery.progress import ParkedKey
from cdc.delivery.transaction_counter import TransactionCounter
from cdc.position import ChangePosition, Position

_COLLECTION: Final = struct(
    "event.collection", (("data_collection", scalar("string")), ("event_count", scalar("int64"))), version=1
).as_optional()
SCHEMAS: Final[SchemaPair] = (
    struct("io.debezium.connector.common.TransactionMetadataKey", (("id", scalar("string")),), version=1),
    struct(
        "io.debezium.connector.common.TransactionMetadataValue",
        (
            ("status", scalar("string")),
            ("id", scalar("string")),
            ("event_count", optional("int64")),
            ("data_collections", ConnectSchema(type="array", items=_COLLECTION, optional=True)),
            ("ts_ms", scalar("int64")),
        ),
        version=1,
    ),
)
"""Schemas of key and value of a record."""


@dataclass(slots=True)
class _OpenTransaction:
    """A transaction of which not all events have passed."""

    position: int
    xid: int
    millis: int
    """Commit time since 1970."""
    last: int = 0
    """Ordinal of the last event."""


class TransactionBoundaries:
    """Adds the records to the events of one window of the log, which has whole transactions, part by part."""

    def __init__(self, identity: DeliveryIdentity, record: Callable[[str, str], tuple[bytes, bytes]]) -> None:
        """record: returns key and value as bytes, from their JSON."""
        self._topic = _topic(identity)
        self._log_id = identity.log_id
        self._encoded = record
        self.counter = TransactionCounter()
        """Counter with which the parts have to be encoded."""
        self._open: _OpenTransaction | None = None

    def added(self, part: EventPart, rows: pa.Table) -> EventPart:
        """Return the events of a part with the records that belong between them; rows: log rows of the part."""
        found: list[tuple[Event, ParkedKey | int]] = []
        columns = rows.select(["position", "ordinal", "xid"]).to_pydict()
        millis = rows["committed_at"].cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64()).to_pylist()
        counted = set(part.counted)
        number = 0
        own = list(part.events)
        # a transaction whose changes cannot be encoded has records too
        for row in sorted(counted.union(part.rows)):
            if self._open is not None and self._open.position != columns["position"][row]:
                found.append(self._record("END", self._open))
                self._open = None
            if row in counted:
                ordinal = columns["ordinal"][row]
                if self._open is None:
                    place = columns["position"][row], columns["xid"][row]
                    self._open = _OpenTransaction(*place, millis[row], ordinal)
                    found.append(self._record("BEGIN", self._open))
                self._open.last = ordinal
            while number < len(part.rows) and part.rows[number] == row:
                found.append((own[number], number))
                number += 1
        events, sources = [event for event, _ in found], [source for _, source in found]
        return replace(part, events=events, letters=_letters(sources, part.letters), rows=(), counted=())

    def end(self) -> EventPart:
        """Return the record END of the last transaction; no event if the window has no transaction."""
        if self._open is None:
            return EventPart([], _letters([], None))
        event, letter = self._record("END", self._open)
        self._open = None
        return EventPart([event], _letters([letter], None))

    def _record(self, status: str, transaction: _OpenTransaction) -> tuple[Event, ParkedKey]:
        position = Position(transaction.position)
        name = f"{transaction.xid}:{int(position.lsn)}"
        is_end = status == "END"
        counts = self.counter.events_of(transaction.position)
        collections = [{"data_collection": table, "event_count": n} for table, n in counts.items() if table is not None]
        value = {
            "status": status,
            "id": name,
            "event_count": counts.total() if is_end else None,
            "data_collections": collections if is_end else None,
            "ts_ms": transaction.millis,
        }
        identity = f"{self._log_id}/{position!s}/{transaction.last}/{status.lower()}"
        key, content = self._encoded(_json({"id": name}), _json(value))
        event = Event(
            id=identity,
            position=transaction.position,
            ordinal=transaction.last,
            topic=self._topic,
            key=key,
            value=content,
            headers=(
                (ID_HEADER, identity.encode()),
                (POSITION_HEADER, str(position).encode()),
                (XID_HEADER, b"%d" % transaction.xid),
            ),
        )
        first = ChangePosition(position, transaction.last)
        return event, ParkedKey(first=first, relation=None, table="", topic=self._topic, key=(name,))


def boundaries_for(
    settings: DeliverySettings, identity: DeliveryIdentity, encoding: Format
) -> TransactionBoundaries | None:
    """Return what adds the records to the parts of one window; None if the delivery does not send them."""
    if settings.format is not EventFormat.DEBEZIUM or not settings.debezium.transaction:
        return None
    if isinstance(encoding, EncodesRecords):
        return TransactionBoundaries(identity, partial(encoding.record, _topic(identity), SCHEMAS))
    key, value = map(schema_frame, SCHEMAS) if settings.debezium.schemas else (NO_SCHEMA, NO_SCHEMA)
    return TransactionBoundaries(identity, lambda *texts: (_framed(key, texts[0]), _framed(value, texts[1])))


def _topic(identity: DeliveryIdentity) -> str:
    return f"{identity.pipeline}.transaction"


def _letters(
    sources: list[ParkedKey | int] | list[ParkedKey], inner: Callable[[int], ParkedKey] | None
) -> Callable[[int], ParkedKey]:
    def letter(index: int) -> ParkedKey:
        source = sources[index]
        if isinstance(source, ParkedKey):
            return source
        if inner is None:
            raise IndexError(f"a part without changes has no event {index}")
        return inner(source)

    return letter


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _framed(frame: tuple[str, str], payload: str) -> bytes:
    return payload.join(frame).encode()
