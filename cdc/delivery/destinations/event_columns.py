"""Events as columns: what many events have in common is stored once, and their fields are arrays.

A destination that can pass columns to its client needs no object for each event; for every other one the events are
made when it reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Final, overload

import numpy as np
import pyarrow as pa

from cdc.delivery.destinations.contract import ID_HEADER, POSITION_HEADER, XID_HEADER, Event
from cdc.delivery.formats.contract import Headers

_new_event: Final[Callable[[Iterable[Any]], Event]] = partial(tuple.__new__, Event)
"""Makes an event of its fields, without the steps of Python that `Event._make` has for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFields:
    """The fields of some events, one entry per event unless said otherwise."""

    ids: pa.StringArray
    positions: np.ndarray
    ordinals: np.ndarray
    topics: Sequence[str]
    """The distinct topics."""
    topic_numbers: np.ndarray
    """Index of the topic of each event."""
    keys: pa.Array
    """Binary, or large binary if there is more than 2 GiB; so are the values."""
    values: pa.Array
    transactions: np.ndarray
    """Index of the transaction of each event."""
    position_texts: pa.BinaryArray
    """Position of each transaction."""
    xid_texts: pa.BinaryArray
    """Transaction id of each transaction."""
    more_headers: Sequence[Headers] | None = None
    """Headers of each event after those that every event has; None if no event has any."""

    def slice(self, first: int, end: int) -> EventFields:
        """Return the fields of some of the events."""
        some = slice(first, end)
        return replace(
            self,
            ids=self.ids[some],
            positions=self.positions[some],
            ordinals=self.ordinals[some],
            topic_numbers=self.topic_numbers[some],
            keys=self.keys[some],
            values=self.values[some],
            transactions=self.transactions[some],
            more_headers=None if self.more_headers is None else self.more_headers[some],
        )

    def events(self) -> list[Event]:
        """Make the events, without a step of Python for each."""
        ids, transactions = self.ids.to_pylist(), self.transactions.tolist()
        own = zip(repeat(ID_HEADER), map(str.encode, ids))
        shared = (
            map([(name, text) for text in texts.to_pylist()].__getitem__, transactions)
            for name, texts in ((POSITION_HEADER, self.position_texts), (XID_HEADER, self.xid_texts))
        )
        headers: Iterable[Headers] = zip(own, *shared, strict=True)
        if self.more_headers is not None:
            headers = [given + more for given, more in zip(headers, self.more_headers, strict=True)]
        topics = map(self.topics.__getitem__, self.topic_numbers.tolist())
        keys, values = self.keys.to_pylist(), self.values.to_pylist()
        fields = (ids, self.positions.tolist(), self.ordinals.tolist(), topics, keys, values, headers)
        return list(map(_new_event, zip(*fields, strict=True)))


class EventColumns(Sequence[Event]):
    """A sequence of events that are made, all at once, when the first of them is read."""

    def __init__(self, fields: EventFields) -> None:
        self._fields: EventFields | None = fields
        self._made: list[Event] = []
        self._count = len(fields.ids)

    @property
    def fields(self) -> EventFields | None:
        """The columns; None once the events have been made, because both would need the memory twice."""
        return self._fields

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        return self._events[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    @property
    def _events(self) -> list[Event]:
        if self._fields is not None:
            self._made, self._fields = self._fields.events(), None
        return self._made
