"""Events from the log again: pages that begin anywhere, with the ids that the loop sends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cdc.delivery.destinations.contract import Event
from cdc.delivery.missed_events import LoggedHistory
from cdc.delivery.progress import order_key
from cdc.errors import CdcError, DeliveryOfAnotherLog, MalformedPosition
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from tests.delivery.destinations.planned import PlannedDestination
from tests.delivery.loop_run import LoopRun
from tests.delivery.sent_log import (
    ONE_SEGMENT,
    SEGMENT_PER_COMMIT,
    begin_log,
    change,
    commit_in_groups,
    random_transactions,
)
from tests.log.sample_log import ORDERS, commit_rows


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    return tmp_path / "log"


def history_of(root: Path, parked: frozenset[str] = frozenset(), **fields: Any) -> LoggedHistory:
    run = LoopRun(root, PlannedDestination(), **fields)
    return LoggedHistory(run.log, run.source, lambda: parked)


def pages(history: LoggedHistory, after: str, most: int) -> Iterator[list[Event]]:
    while True:
        page = history.page(after, most)
        yield list(page.events)
        if page.is_last:
            assert history.page(page.next, most).events == []
            return
        assert len(page.events) == most
        after = page.next


def everything(history: LoggedHistory, after: str = "", most: int = 100_000) -> list[Event]:
    return [event for page in pages(history, after, most) for event in page]


def test_a_page_begins_after_any_event(root: Path) -> None:
    random = Random(5)
    commit_in_groups(begin_log(root, ONE_SEGMENT), random_transactions(random, 20, 10, most=6), random)
    history = history_of(root, batch=4)
    whole = everything(history)

    assert len(whole) > 30
    for number, event in enumerate(whole):
        assert history.page(event.id, 5).events == whole[number + 1 : number + 6]
    for most in (2, 7):
        assert everything(history, most=most) == whole
    history.close()


def test_a_page_has_what_was_committed_since(root: Path) -> None:
    writer = begin_log(root)
    history = history_of(root)
    empty = history.page("", 10)
    commit_rows(writer, change(ORDERS, 20, 0, "1"), change(ORDERS, 20, 1, "2"))
    page = history.page(empty.next, 10)
    commit_rows(writer, change(ORDERS, 30, 0, "1"))
    later = history.page(page.next, 10)
    history.close()

    assert (empty.events, empty.is_last) == ([], True)
    assert [event.position for event in page.events] == [20, 20]
    assert [event.position for event in later.events] == [30]


def test_the_compacted_state_comes_first_and_in_pages_too(root: Path) -> None:
    random = Random(6)
    commit_in_groups(begin_log(root, SEGMENT_PER_COMMIT), random_transactions(random, 20, 10, most=6), random)
    compact(None, root, upto=Position(90), everything=True)
    history = history_of(root, batch=5)
    whole = everything(history)

    assert min(event.position for event in whole) < 90
    for most in (3, 8):
        assert everything(history, most=most) == whole
    for event in [one for one in whole if one.position > 90][::9]:
        place = event.position, event.ordinal
        assert everything(history, event.id) == [one for one in whole if (one.position, one.ordinal) > place]
    history.close()


def test_events_of_a_key_with_a_dead_letter_are_left_out(root: Path) -> None:
    writer = begin_log(root)
    commit_rows(writer, *(change(ORDERS, 20, number, str(number % 3)) for number in range(9)))
    whole = everything(history_of(root))
    parked = order_key(whole[1].topic, ("1",))
    history = history_of(root, frozenset({parked}))

    assert everything(history, most=2) == [one for one in whole if one.ordinal % 3 != 1]
    history.close()


@pytest.mark.parametrize(
    ("after", "error"),
    [
        ("nonsense", MalformedPosition),
        ("~1.2.3", MalformedPosition),
        ("another/0/14/0", DeliveryOfAnotherLog),
        ("~99999999999999999999.0.0.0", MalformedPosition),
    ],
)
def test_what_is_no_start_in_this_log_is_refused(root: Path, after: str, error: type[CdcError]) -> None:
    begin_log(root)
    history = history_of(root)
    with pytest.raises(error):
        history.page(after, 10)
    history.close()
