"""Encoder of a delivery: selects and routes the changes of log rows, and encodes them as events in log order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.deliveries import DeliverySettings
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.event_part import EventGroup, EventPart
from cdc.delivery.formats.contract import EncodedEvents, Format
from cdc.delivery.formats.table_changes import TransactionNumbers
from cdc.delivery.message_routes import MessageRoutes, RoutedMessages
from cdc.delivery.outbox_route import OutboxRoute
from cdc.delivery.table_routes import RoutedChanges, TableRoute
from cdc.errors import CdcError, LogCorrupt
from cdc.log.file_selection import EVERY_ROW, TableSelection
from cdc.log_row import Operation
from cdc.table import TableSchema, exact_glob, matches

_MESSAGE: Final = Operation.MESSAGE.value
_SCHEMA: Final = Operation.SCHEMA.value

Schemas = dict[int, TableSchema]
"""Relation → schema in force; the encoder adopts the `s` rows that it passes."""
Numbering = Callable[[pa.Table, np.ndarray], tuple[TransactionNumbers, np.ndarray]]
"""Function that numbers the rows that have an event; see TransactionCounter.number."""


class _Routed(NamedTuple):
    """Changes that were routed together and are not yet encoded."""

    rows: np.ndarray
    """Index of the row of each change that has an event."""
    encoded: Callable[[TransactionNumbers | None], EventGroup]
    """Returns their events, given the numbers of the rows in their transactions."""


class EventEncoder:
    """Makes events of log rows. Two threads may use it, each with schemas of its own."""

    def __init__(self, settings: DeliverySettings, identity: DeliveryIdentity, encoding: Format) -> None:
        self._settings = settings
        self._identity = identity
        self._format = encoding
        outbox = () if settings.outbox is None else (exact_glob(settings.outbox.table),)
        self._globs = (*settings.tables, *outbox)
        self.tables = EVERY_ROW if settings.messages else TableSelection(globs=self._globs)
        """Tables of which the delivery reads rows; a message belongs to no table, so it needs every row."""
        self._message_routes = MessageRoutes(settings.messages, identity.pipeline)
        self._routes: dict[int, tuple[TableSchema, TableRoute | OutboxRoute]] = {}

    def selected(self, rows: pa.Table) -> pa.Table:
        """Return the rows of the tables and messages of this delivery, without those that a backfill reads for another
        sink, and all `s` rows.
        """
        mine = pc.is_in(rows["topic"], pa.array(self._topics(rows), pa.string()))
        mine = pc.or_(mine, pc.equal(rows["op"], _SCHEMA))
        if self._settings.messages:
            mine = pc.or_(mine, pc.equal(rows["op"], _MESSAGE))
        if rows["address"].null_count < rows.num_rows:
            mine = pc.and_(mine, pc.equal(pc.fill_null(rows["address"], self._settings.name), self._settings.name))
        return rows if pc.all(mine).as_py() else rows.filter(mine).combine_chunks()

    def encode(self, rows: pa.Table, schemas: Schemas, number: Numbering | None = None) -> EventPart:
        """Return the events of rows that `selected` returned.

        schemas: in force before the first row; number: numbers the events in their transactions.
        """
        routed = [one for schema, chosen in self._versions(rows, schemas) for one in self._table(schema, chosen, rows)]
        routed += [_Routed(one.indices, partial(self._message_group, one)) for one in self._message_routes.routed(rows)]
        if number is None or not routed:
            return EventPart.of(rows, [one.encoded(None) for one in routed], self._identity.log_id)
        numbers, counted = number(rows, np.concatenate([one.rows for one in routed]))
        groups = [one.encoded(numbers.take(one.rows)) for one in routed]
        return replace(EventPart.of(rows, groups, self._identity.log_id), counted=counted.tolist())

    def _topics(self, rows: pa.Table) -> list[str]:
        return [topic for topic in rows["topic"].unique().to_pylist() if topic and matches(topic, self._globs)]

    @staticmethod
    def _versions(rows: pa.Table, schemas: Schemas) -> Iterator[tuple[TableSchema, np.ndarray]]:
        """Yield the indices of the rows of each version of each table; adopts the new versions."""
        relations = pc.fill_null(rows["relation"], -1).to_numpy()
        control = np.flatnonzero(pc.equal(rows["op"], _SCHEMA).to_numpy())
        for number in np.unique(relations[relations >= 0]).tolist():
            own = np.flatnonzero(relations == number)
            start = 0
            for change in control[np.isin(control, own)]:
                end = int(np.searchsorted(own, change))
                if end > start:
                    yield _known(schemas, number), own[start:end]
                version = TableSchema.from_json(rows["payload"][int(change)].as_py())
                schemas[number] = version.following(schemas.get(number))
                start = end + 1
            if start < len(own):
                yield _known(schemas, number), own[start:]

    def _table(self, schema: TableSchema, chosen: np.ndarray, rows: pa.Table) -> Iterator[_Routed]:
        outbox = self._settings.outbox
        is_outbox = outbox is not None and outbox.table == schema.topic
        if not is_outbox and not matches(schema.topic, self._settings.tables):
            return
        route = self._route(schema, is_outbox=is_outbox)
        own = rows if len(chosen) == rows.num_rows else rows.take(pa.array(chosen))
        if isinstance(route, OutboxRoute):
            topics, encoded = route.encode(own)
            keys = dict(zip(encoded.source.tolist(), encoded.keys.to_pylist(), strict=True))
            group = EventGroup(
                rows=chosen,
                encoded=encoded,
                topics=topics,
                headers=None,
                key=lambda number: (keys[number],),
                relation=schema.relation,
                table=schema.topic,
            )
            yield _Routed(group.event_rows, lambda _numbers: group)
            return
        for part in route.routed(own):
            yield _Routed(chosen[part.indices], partial(self._changes, schema, chosen[part.indices], part))

    def _changes(
        self, schema: TableSchema, rows: np.ndarray, part: RoutedChanges, numbers: TransactionNumbers | None
    ) -> EventGroup:
        changes = replace(part.changes, numbers=numbers)
        return EventGroup(
            rows=rows,
            encoded=self._format.encode(changes) if part.refusal is None else _refused(changes.count, part.refusal),
            topics=changes.topic,
            headers=part.headers,
            key=part.key,
            relation=schema.relation,
            table=schema.topic,
        )

    def _route(self, schema: TableSchema, *, is_outbox: bool) -> TableRoute | OutboxRoute:
        known = self._routes.get(schema.relation)
        if known is not None and known[0] == schema:
            return known[1]
        pipeline = self._identity.pipeline
        route: TableRoute | OutboxRoute
        if is_outbox and self._settings.outbox is not None:
            route = OutboxRoute(schema, self._settings.outbox, pipeline)
        else:
            route = TableRoute(schema, self._settings, pipeline)
        self._routes[schema.relation] = schema, route
        return route

    def _message_group(self, part: RoutedMessages, numbers: TransactionNumbers | None) -> EventGroup:
        if part.refusal is None:
            encoded = self._format.encode_messages(replace(part.messages, numbers=numbers))
        else:
            encoded = _refused(len(part.indices), part.refusal)
        if part.keys is not None:
            encoded = replace(encoded, keys=pa.array([part.keys[one] for one in encoded.source], pa.string()))
        return EventGroup(
            rows=part.indices,
            encoded=encoded,
            topics=part.messages.topic,
            headers=None,
            key=part.key,
            relation=None,
            table=part.prefixes,
        )


def _refused(count: int, reason: CdcError) -> EncodedEvents:
    """Return no events, and the reason for which each change has none."""
    nothing = pa.array([], pa.binary())
    refused = dict.fromkeys(range(count), reason)
    return EncodedEvents(source=np.empty(0, np.int64), keys=nothing, values=nothing, refused=refused)


def _known(schemas: Schemas, relation: int) -> TableSchema:
    if relation not in schemas:
        raise LogCorrupt(f"the log has rows of relation {relation}, but no schema of it before them")
    return schemas[relation]
