"""EventPart: the events of some log rows, assembled in log order from groups of changes that were encoded together.

Everything that the events of a part have in common is made once for the part, or once per transaction, and the rest
column by column: a delivery that catches up spends its time here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa

from cdc.delivery.destinations.contract import ID_HEADER, POSITION_HEADER, XID_HEADER, Event
from cdc.delivery.formats.contract import EncodedEvents, Headers
from cdc.delivery.formats.event_rows import JsonRows
from cdc.delivery.progress import ParkedKey
from cdc.errors import CdcError
from cdc.position import ChangePosition, Position

KeyOf = Callable[[int], tuple[str | None, ...]]
"""Function that returns the texts of the key of a change in a group, given its number."""
_new_event: Final[Callable[[Iterable[Any]], Event]] = partial(tuple.__new__, Event)
"""Makes an event of its fields, without the steps of Python that `Event._make` has for each."""


@dataclass(frozen=True, slots=True)
class EventGroup:
    """Changes that were routed together, and their events."""

    rows: np.ndarray
    """Index of the row of each change in the part."""
    encoded: EncodedEvents
    topics: str | list[str]
    """Topic of all events, or of each."""
    headers: list[Headers] | None
    """Headers that the route adds to the events of each change."""
    key: KeyOf
    relation: int | None
    table: str | Sequence[str]
    """Name of the table, or prefix of each message."""

    @property
    def event_rows(self) -> np.ndarray:
        """Index of the row of each event."""
        return self.rows[self.encoded.source]

    def topic(self, number: int) -> str:
        """Return the topic of an event."""
        return self.topics if isinstance(self.topics, str) else self.topics[number]

    def letter(self, rows: pa.Table, change: int, topic: str) -> ParkedKey:
        """Return the dead letter that an event of a change would be. rows: the rows of the part"""
        row = int(self.rows[change])
        return ParkedKey(
            first=ChangePosition(Position(rows["position"][row].as_py()), rows["ordinal"][row].as_py()),
            relation=self.relation,
            table=self.table if isinstance(self.table, str) else self.table[change],
            topic=topic,
            key=self.key(change),
        )


@dataclass(frozen=True, slots=True)
class EventPart:
    """The events of some log rows, in log order."""

    events: list[Event]
    letters: Callable[[int], ParkedKey]
    """Returns the dead letter that an event would be, without reason, given the index of the event."""
    refused: Sequence[tuple[ParkedKey, CdcError]] = ()
    """Changes that cannot be encoded."""
    rows: Sequence[int] = ()
    """Index of the row of each event; empty if the events are not only those of rows."""
    counted: Sequence[int] = ()
    """Index of each row that has a number in its transaction, in order; empty without a counter."""

    @classmethod
    def of(cls, rows: pa.Table, groups: Sequence[EventGroup], log_id: str) -> Self:
        """Return the events of all groups. rows: the rows of the part, in log order, one chunk per column"""
        if not groups:
            return cls([], _nothing)
        places = np.concatenate([group.event_rows for group in groups])
        order = np.argsort(places, kind="stable")
        identities = _Identities(rows, log_id)
        events = list(chain.from_iterable(_events(identities, group) for group in groups))
        owners = np.repeat(np.arange(len(groups)), [len(group.encoded.source) for group in groups])[order]
        numbers = np.concatenate([np.arange(len(group.encoded.source)) for group in groups])[order]
        refused = [
            (group.letter(rows, change, group.topic(0)), reason)
            for group in groups
            for change, reason in group.encoded.refused.items()
        ]

        def letter(index: int) -> ParkedKey:
            group, number = groups[owners[index]], int(numbers[index])
            return group.letter(rows, int(group.encoded.source[number]), group.topic(number))

        if len(groups) > 1:
            events = [events[number] for number in order.tolist()]
        return cls(events, letter, refused, places[order].tolist())


class _Identities:
    """Position, ordinal, id and first headers of the event of each row of a part."""

    def __init__(self, rows: pa.Table, log_id: str) -> None:
        texts = JsonRows(rows)
        self._positions, self._ordinals = texts.array("position"), texts.array("ordinal")
        self._ids = texts.event_ids(log_id)
        self._transactions = texts.transactions.numbers
        xids = texts.array("xid").take(pa.array(texts.transactions.firsts)).to_pylist()
        self._position_headers = [(POSITION_HEADER, text.encode()) for text in texts.transactions.positions]
        self._xid_headers = [(XID_HEADER, b"%d" % xid) for xid in xids]

    def columns(
        self, chosen: np.ndarray, suffixes: Sequence[str] | None
    ) -> tuple[list[str], list[int], list[int], list[Headers]]:
        """Return ids, positions, ordinals and headers of the events of rows. suffixes: ends of their ids"""
        ids, positions, ordinals = (
            column.take(pa.array(chosen)).to_pylist() for column in (self._ids, self._positions, self._ordinals)
        )
        if suffixes is not None:
            ids = [one + suffix for one, suffix in zip(ids, suffixes, strict=True)]
        transactions = self._transactions[chosen].tolist()
        # without a step of Python per event
        own = zip(repeat(ID_HEADER), map(str.encode, ids))
        shared = (map(found.__getitem__, transactions) for found in (self._position_headers, self._xid_headers))
        headers: list[Headers] = list(zip(own, *shared, strict=True))
        return ids, positions, ordinals, headers


def _events(identities: _Identities, group: EventGroup) -> Iterable[Event]:
    """Return the events of a group, in its order."""
    encoded = group.encoded
    ids, positions, ordinals, headers = identities.columns(group.event_rows, encoded.suffixes)
    if encoded.headers is not None:
        headers = [given + more for given, more in zip(headers, encoded.headers, strict=True)]
    if group.headers is not None:
        headers = [given + group.headers[change] for given, change in zip(headers, encoded.source, strict=True)]
    topics = repeat(group.topics, len(ids)) if isinstance(group.topics, str) else group.topics
    keys, values = (_as_bytes(column).to_pylist() for column in (encoded.keys, encoded.values))
    return map(_new_event, zip(ids, positions, ordinals, topics, keys, values, headers, strict=True))


def _as_bytes(column: pa.Array) -> pa.Array:
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return column
    return column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())


def _nothing(index: int) -> ParkedKey:
    raise IndexError(f"a part without events has no event {index}")
