"""Records that say where a source transaction begins and ends, as Debezium's `provide.transaction.metadata` sends them.

The record END has the number of events between both records: those of tables, per table, and transactional logical
messages. A tombstone is not counted. Rows of a copy belong to no transaction.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.deliveries import DeliverySettings, EventEncoding, EventFormat
from cdc.delivery.destinations.contract import ID_HEADER, POSITION_HEADER, XID_HEADER, DeliveryIdentity, Event
from cdc.delivery.event_part import EventPart
from cdc.delivery.formats.connect_schema import ConnectSchema, SchemaPair, optional, scalar, struct
from cdc.delivery.formats.contract import TOMBSTONE
from cdc.delivery.formats.debezium_rows import NO_SCHEMA, schema_frame
from cdc.delivery.progress import ParkedKey
from cdc.log_row import Operation
from cdc.logical_message import message_keys
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
    count: int = 0
    tables: Counter[str] = field(default_factory=Counter)


class TransactionBoundaries:
    """Adds the records to the events of one window of the log, which has whole transactions, part by part."""

    def __init__(self, identity: DeliveryIdentity, *, schemas: bool) -> None:
        """schemas: whether each key and value contains its schema."""
        self._topic, self._log_id = f"{identity.pipeline}.transaction", identity.log_id
        self._frames = tuple(map(schema_frame, SCHEMAS)) if schemas else (NO_SCHEMA, NO_SCHEMA)
        self._open: _OpenTransaction | None = None

    def added(self, part: EventPart, rows: pa.Table) -> EventPart:
        """Return the events of a part with the records that belong between them; rows: log rows of the part."""
        found: list[tuple[Event, ParkedKey | int]] = []
        columns = rows.select(["topic", "xid"]).to_pydict()
        millis = rows["committed_at"].cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64()).to_pylist()
        is_inside = _in_transaction(rows)
        for number, (event, row) in enumerate(zip(part.events, part.rows, strict=True)):
            if self._open is not None and self._open.position != event.position:
                found.append(self._record("END", self._open))
                self._open = None
            if is_inside[row]:
                if self._open is None:
                    self._open = _OpenTransaction(event.position, columns["xid"][row], millis[row], event.ordinal)
                    found.append(self._record("BEGIN", self._open))
                _count(self._open, event, columns["topic"][row])
            found.append((event, number))
        events, sources = [event for event, _ in found], [source for _, source in found]
        return replace(part, events=events, letters=_letters(sources, part.letters), rows=())

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
        collections = [{"data_collection": table, "event_count": n} for table, n in transaction.tables.items()]
        value = {
            "status": status,
            "id": name,
            "event_count": transaction.count if is_end else None,
            "data_collections": collections if is_end else None,
            "ts_ms": transaction.millis,
        }
        identity = f"{self._log_id}/{position!s}/{transaction.last}/{status.lower()}"
        event = Event(
            id=identity,
            position=transaction.position,
            ordinal=transaction.last,
            topic=self._topic,
            key=_framed(self._frames[0], {"id": name}),
            value=_framed(self._frames[1], value),
            headers=(
                (ID_HEADER, identity.encode()),
                (POSITION_HEADER, str(position).encode()),
                (XID_HEADER, b"%d" % transaction.xid),
            ),
        )
        first = ChangePosition(position, transaction.last)
        return event, ParkedKey(first=first, relation=None, table="", topic=self._topic, key=(name,))


def boundaries_for(settings: DeliverySettings, identity: DeliveryIdentity) -> TransactionBoundaries | None:
    """Return what adds the records to the parts of one window; None if the delivery does not send them."""
    is_debezium = settings.format is EventFormat.DEBEZIUM and settings.encoding is EventEncoding.JSON
    if not is_debezium or not settings.debezium.transaction:
        return None
    return TransactionBoundaries(identity, schemas=settings.debezium.schemas)


def _in_transaction(rows: pa.Table) -> list[bool]:
    """Return for each row whether its events are between the records of its transaction."""
    is_message = pc.equal(rows["op"], Operation.MESSAGE.value)
    found = [not flag for flag in pc.equal(rows["op"], Operation.READ.value).to_pylist()]
    if pc.any(is_message).as_py():
        kinds = message_keys(rows["key"].filter(is_message).combine_chunks()).transactional
        for row, kind in zip(pc.indices_nonzero(is_message).to_pylist(), kinds.to_pylist(), strict=True):
            found[row] = kind is not False  # an older log does not record the kind
    return found


def _count(transaction: _OpenTransaction, event: Event, table: str | None) -> None:
    transaction.last = event.ordinal
    if event.id.endswith(TOMBSTONE):
        return
    transaction.count += 1
    if table is not None:
        transaction.tables[table] += 1


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


def _framed(frame: tuple[str, str], payload: dict[str, Any]) -> bytes:
    start, end = frame
    return f"{start}{json.dumps(payload, separators=(',', ':'), ensure_ascii=False)}{end}".encode()
