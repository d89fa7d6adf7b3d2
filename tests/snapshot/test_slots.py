"""How many chunks of a copy are in memory, and on their way in front of the stream: cdc/snapshot/chunks.py."""

from __future__ import annotations

from cdc.snapshot.chunks import Slots


def test_so_many_are_taken_and_one_more_when_one_is_given_back() -> None:
    slots = Slots(2)

    assert [slots.take(alone=False) for _ in range(3)] == [True, True, False]
    slots.give_back()
    assert slots.take(alone=False)


def test_while_the_stream_brings_rows_one_is_on_its_way_of_all_connections() -> None:
    slots = Slots(4)

    assert slots.take(alone=True)
    assert not slots.take(alone=True)
    assert slots.take(alone=False)
    slots.give_back()
    assert not slots.take(alone=True)
    slots.give_back()
    assert slots.take(alone=True)
