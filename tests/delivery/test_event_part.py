from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cdc.delivery.event_part import EventGroup, EventPart
from cdc.delivery.formats.contract import TOMBSTONE, EncodedEvents, Headers
from cdc.errors import EventNotEncodable
from cdc.position import Position
from tests.log.rows import row, table

ROWS = table(row(7, ordinal=0), row(7, ordinal=1), row(1 << 52 | 255, ordinal=4), row(1 << 52 | 256, ordinal=0))


def group(
    rows: list[int], source: list[int], *, route_headers: list[Headers] | None = None, **fields: Any
) -> EventGroup:
    """Changes of some rows; source: the change of each event."""
    values = pa.array([b"%d" % rows[change] for change in source], pa.binary())
    encoded = EncodedEvents(source=np.array(source), keys=values, values=values, **fields)
    return EventGroup(
        rows=np.array(rows),
        encoded=encoded,
        topics=[f"t{rows[change]}" for change in source],
        headers=route_headers,
        key=lambda change: (str(rows[change]),),
        relation=5,
        table="shop.orders",
    )


def test_events_of_several_groups_are_in_the_order_of_the_rows() -> None:
    part = EventPart.of(ROWS, [group([1, 3], [0, 1]), group([0, 2], [0, 1])], "L")

    assert [one.id for one in part.events] == ["L/0/7/0", "L/0/7/1", "L/1:0/FF/4", "L/1:0/100/0"]
    assert [(one.position, one.ordinal) for one in part.events] == [
        (7, 0),
        (7, 1),
        (1 << 52 | 255, 4),
        (1 << 52 | 256, 0),
    ]
    assert [one.value for one in part.events] == [b"0", b"1", b"2", b"3"]
    assert [one.topic for one in part.events] == ["t0", "t1", "t2", "t3"]
    assert [part.letters(number).key for number in range(4)] == [("0",), ("1",), ("2",), ("3",)]
    assert part.letters(3).first == (Position(1 << 52 | 256), 0)
    assert part.rows == [0, 1, 2, 3]


def test_headers_name_the_event_and_its_transaction_and_then_what_format_and_route_add() -> None:
    of_format: list[Headers] = [(("format", b"f0"),), (("format", b"f1"),)]
    of_route: list[Headers] = [(("route", b"r0"),), (("route", b"r1"),)]
    part = EventPart.of(ROWS, [group([1, 2], [1, 1], route_headers=of_route, headers=of_format)], "L")

    assert part.events[0].headers[:2] == (("cdc.id", b"L/1:0/FF/4"), ("cdc.position", b"1:0/FF"))
    assert [one.headers[3:] for one in part.events] == [(*given, *of_route[1]) for given in of_format]


def test_as_many_events_as_rows_need_not_be_one_for_each_row() -> None:
    part = EventPart.of(ROWS, [group([0, 1, 2, 3], [0, 2, 2, 3], suffixes=["", "", TOMBSTONE, ""])], "L")

    assert [one.id for one in part.events] == ["L/0/7/0", "L/1:0/FF/4", f"L/1:0/FF/4{TOMBSTONE}", "L/1:0/100/0"]
    assert part.events[2].headers[0] == ("cdc.id", f"L/1:0/FF/4{TOMBSTONE}".encode())
    assert part.events[2].ordinal == 4


def test_a_change_that_cannot_be_encoded_is_a_letter_of_its_row() -> None:
    reason = EventNotEncodable("because")
    part = EventPart.of(ROWS, [group([1, 3], [0], refused={1: reason})], "L")

    ((letter, found),) = part.refused
    assert (letter.key, letter.first, found) == (("3",), (Position(1 << 52 | 256), 0), reason)


def test_a_part_without_changes_has_no_event() -> None:
    part = EventPart.of(ROWS, [], "L")

    assert part.events == []
    with pytest.raises(IndexError):
        part.letters(0)
