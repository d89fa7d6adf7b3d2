"""EventPart: the events of some log rows, assembled in log order from groups of changes that were encoded together.

Everything that the events of a part have in common is made once for the part, or once per transaction, and the rest
column by column: a delivery that catches up spends its time here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.delivery.destinations.contract import Event
from cdc.delivery.destinations.event_columns import EventColumns, EventFields
from cdc.delivery.formats.contract import EncodedEvents, Headers
from cdc.delivery.formats.event_rows import JsonRows
from cdc.delivery.progress import ParkedKey
from cdc.errors import CdcError
from cdc.position import ChangePosition, Position

_MOST_BYTES: Final = 2**31 - 1
"""Maximum bytes of a column of type binary."""
KeyOf = Callable[[int], tuple[str | None, ...]]
"""Function that returns the texts of the key of a change in a group, given its number."""


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

    events: Sequence[Event]
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

        chosen = places[order]
        fields = _fields(rows, chosen, groups, None if len(groups) == 1 else pa.array(order), log_id)
        return cls(EventColumns(fields), letter, refused, chosen.tolist())


def _fields(
    rows: pa.Table, chosen: np.ndarray, groups: Sequence[EventGroup], order: pa.Array | None, log_id: str
) -> EventFields:
    """Return the fields of the events of all groups.

    chosen: the row of each event. order: where each event is in the sequence of the groups; None: at the same place.
    """
    texts, found = JsonRows(rows), [group.encoded for group in groups]
    ids = texts.event_ids(log_id)
    if not np.array_equal(chosen, np.arange(rows.num_rows)):
        ids = ids.take(pa.array(chosen))
    if any(one.suffixes is not None for one in found):
        suffixes = pa.array(chain.from_iterable(one.suffixes or [""] * len(one.source) for one in found), pa.string())
        ids = pc.binary_join_element_wise(ids, suffixes if order is None else suffixes.take(order), "")
    transactions = texts.transactions
    topics, topic_numbers = _topics(groups)
    return EventFields(
        ids=ids,
        positions=texts.array("position").to_numpy()[chosen],
        ordinals=texts.array("ordinal").to_numpy()[chosen],
        topics=topics,
        topic_numbers=topic_numbers if order is None else topic_numbers[order.to_numpy()],
        keys=_in_order([one.keys for one in found], order),
        values=_in_order([one.values for one in found], order),
        transactions=transactions.numbers[chosen],
        position_texts=_as_bytes(transactions.positions),
        xid_texts=_as_bytes(texts.xids().take(pa.array(transactions.firsts))),
        more_headers=_more_headers(groups, order),
    )


def _topics(groups: Iterable[EventGroup]) -> tuple[list[str], np.ndarray]:
    """Return the distinct topics, and the number of the topic of each event, group by group."""
    known: dict[str, int] = {}
    numbers = [
        np.full(len(group.encoded.source), known.setdefault(group.topics, len(known)))
        if isinstance(group.topics, str)
        else np.array([known.setdefault(topic, len(known)) for topic in group.topics], np.int64)
        for group in groups
    ]
    return list(known), np.concatenate(numbers)


def _more_headers(groups: Sequence[EventGroup], order: pa.Array | None) -> list[Headers] | None:
    """Return the headers that formats and routes add to each event; None if they add none."""
    if all(group.headers is None and group.encoded.headers is None for group in groups):
        return None
    found = list[Headers]()
    for group in groups:
        encoded = group.encoded
        of_format = encoded.headers or [()] * len(encoded.source)
        of_route = [group.headers[change] for change in encoded.source] if group.headers is not None else None
        found += of_format if of_route is None else map(tuple.__add__, of_format, of_route)
    return found if order is None else [found[number] for number in order.to_pylist()]


def _in_order(columns: Sequence[pa.Array], order: pa.Array | None) -> pa.Array:
    """Return the entries of the columns of all groups as one column of bytes."""
    if order is None:
        return _as_bytes(columns[0])
    found = [_as_bytes(column) for column in columns]
    if len({column.type for column in found}) > 1 or sum(column.nbytes for column in found) >= _MOST_BYTES:
        found = [column.cast(pa.large_binary()) for column in found]
    return pa.concat_arrays(found).take(order)


def _as_bytes(column: pa.Array) -> pa.Array:
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return column
    return column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())


def _nothing(index: int) -> ParkedKey:
    raise IndexError(f"a part without events has no event {index}")
