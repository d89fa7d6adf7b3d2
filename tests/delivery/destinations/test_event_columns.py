from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from cdc.delivery.destinations.contract import Event
from cdc.delivery.destinations.event_columns import EventColumns, EventFields
from cdc.delivery.formats.contract import Headers

EXTRA: list[Headers] = [(), (("a", b"1"),), (("b", b"2"), ("c", b"3"))]


def fields(more_headers: list[Headers] | None = None) -> EventFields:
    return EventFields(
        ids=pa.array(["L/1/0", "L/1/1", "L/2/0"]),
        positions=np.array([1, 1, 2]),
        ordinals=np.array([0, 1, 0]),
        topics=["orders", "items"],
        topic_numbers=np.array([1, 0, 1]),
        keys=pa.array([b"k0", None, b""], pa.binary()),
        values=pa.array([b"v0", b"", None], pa.binary()),
        transactions=np.array([0, 0, 1]),
        position_texts=pa.array([b"0/1", b"0/2"], pa.binary()),
        xid_texts=pa.array([b"7", b"8"], pa.binary()),
        more_headers=more_headers,
    )


def own_headers(name: bytes, position: bytes, xid: bytes) -> Headers:
    return (("cdc.id", name), ("cdc.position", position), ("cdc.xid", xid))


EVENTS = [
    Event("L/1/0", 1, 0, "items", b"k0", b"v0", own_headers(b"L/1/0", b"0/1", b"7")),
    Event("L/1/1", 1, 1, "orders", None, b"", own_headers(b"L/1/1", b"0/1", b"7")),
    Event("L/2/0", 2, 0, "items", b"", None, own_headers(b"L/2/0", b"0/2", b"8")),
]


def test_columns_are_a_sequence_of_their_events() -> None:
    events = EventColumns(fields())

    assert len(events) == 3
    assert [*events] == EVENTS
    assert (events[1], events[1:]) == (EVENTS[1], EVENTS[1:])
    assert all(isinstance(event, Event) for event in events)
    assert {type(events[0].position), type(events[0].ordinal)} == {int}


def test_the_columns_are_given_up_when_the_events_are_made() -> None:
    events = EventColumns(fields())

    assert events.fields is not None
    assert events[0] == EVENTS[0]
    assert events.fields is None
    assert len(events) == 3


@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 1), (1, 3), (2, 9)])
def test_a_slice_has_the_fields_of_some_events(first: int, end: int) -> None:
    expected = [event._replace(headers=(*event.headers, *more)) for event, more in zip(EVENTS, EXTRA, strict=True)]

    assert fields(EXTRA).slice(first, end).events() == expected[first:end]
