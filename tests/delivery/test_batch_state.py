"""The states of a batch, transition by transition, as the table of the module lists them."""

from __future__ import annotations

import pytest

from cdc.delivery.batch_state import MOST_UNNAMED, Idle, OneWindow, SeveralWindows
from cdc.delivery.destinations.contract import EventsRefused
from cdc.delivery.event_source import EventWindow
from cdc.delivery.log_windows import LogWindow
from cdc.errors import CdcError, DestinationDenied, DestinationUnavailable, EventRefused, ProgressLost, Reaction
from cdc.log.file_selection import EVERY_ROW
from cdc.position import Position

REFUSED = EventRefused("no")


def window(upto: int, *, is_last: bool = False) -> EventWindow:
    """A window without events."""
    log_window = LogWindow(
        after=Position(upto - 10),
        upto=Position(upto),
        horizon=None,
        ends_state=False,
        parts=[],
        most=10,
        files=[],
        is_last=is_last,
        only=EVERY_ROW,
    )
    return EventWindow(log_window, [], 0)


def test_a_window_that_is_read_is_sent_first_in_its_batch() -> None:
    first = window(20)

    assert Idle().begin(first) == OneWindow(first)
    assert Idle(Position(30)).begin(first) == OneWindow(first, alone_upto=Position(30))


def test_a_batch_keeps_its_last_window_only() -> None:
    second, third = window(30), window(40)
    several = OneWindow(window(20)).add(second)

    assert several == SeveralWindows(second)
    assert several.add(third) == SeveralWindows(third)


def test_nothing_is_kept_of_a_committed_batch() -> None:
    assert OneWindow(window(20)).commit() == Idle()
    assert SeveralWindows(window(30)).commit() == Idle()


def test_a_batch_grows_while_the_log_has_more() -> None:
    assert OneWindow(window(20)).may_grow
    assert SeveralWindows(window(20)).may_grow
    assert not OneWindow(window(20, is_last=True)).may_grow
    assert not SeveralWindows(window(20, is_last=True)).may_grow


def test_each_window_of_a_failed_batch_is_committed_alone() -> None:
    state = SeveralWindows(window(40)).recover(EventsRefused({"a": REFUSED}))
    grows = []
    for upto in (20, 30, 40, 50):
        sent = state.begin(window(upto))
        grows.append(sent.may_grow)
        state = sent.commit()

    assert grows == [False, False, False, True]


@pytest.mark.parametrize("error", [EventsRefused({}), DestinationUnavailable("gone"), EventRefused("no")])
def test_several_windows_are_read_again_after_an_error_that_does_not_halt(error: EventsRefused | CdcError) -> None:
    assert SeveralWindows(window(40)).recover(error) == Idle(Position(40))


def test_an_error_that_halts_is_raised_from_several_windows() -> None:
    error = ProgressLost("gone")
    assert error.reaction is Reaction.HALT

    with pytest.raises(ProgressLost) as raised:
        SeveralWindows(window(40)).recover(error)
    assert raised.value is error


@pytest.mark.parametrize("error", [DestinationUnavailable("gone"), DestinationDenied("no"), EventRefused("no")])
def test_every_error_but_a_refusal_is_raised_from_one_window(error: CdcError) -> None:
    with pytest.raises(type(error)) as raised:
        OneWindow(window(20)).recover(error)
    assert raised.value is error


def test_a_window_with_refused_events_is_sent_again_and_knows_them() -> None:
    first, refused = window(20), {"a": REFUSED}

    assert OneWindow(first).recover(EventsRefused(refused)) == OneWindow(first, refused=refused)


def test_refusals_that_name_no_event_end_after_a_number_of_them() -> None:
    state = OneWindow(window(20))
    for _ in range(MOST_UNNAMED):
        state = state.recover(EventsRefused({}))

    assert state.recover(EventsRefused({"a": REFUSED})).unnamed == 0
    with pytest.raises(DestinationUnavailable, match=r"up to position 0/14 and does not say which"):
        state.recover(EventsRefused({}))
