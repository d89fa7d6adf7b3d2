"""The loop while it is behind: windows that are sent together, and an error in one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.delivery.destinations.contract import Event
from cdc.errors import DestinationDenied
from tests.delivery.destinations.planned import CollectingDestination, planned
from tests.delivery.loop_run import LoopRun, drain, places_of
from tests.delivery.sent_log import expected, random_log


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    return random_log(tmp_path / "log")


@pytest.mark.parametrize("collects", [True, False])
def test_windows_are_committed_together_if_the_destination_collects(root: Path, collects: bool):
    destination = planned(collects=collects)
    with LoopRun(root, destination, batch=1) as loop:
        loop._collects_for *= 1_000
        before = destination.commits
        drain(loop)

    assert places_of(destination.delivered) == expected(root)
    assert (destination.commits - before == 1) is collects


def test_windows_whose_commit_succeeded_without_an_answer_are_not_sent_again(root: Path):
    destination = CollectingDestination()
    destination.lose_answer = 2  # the first one stores where the delivery begins
    with LoopRun(root, destination, batch=1) as loop:
        drain(loop)

    assert places_of(destination.delivered) == expected(root)


def test_what_comes_before_an_error_is_delivered(root: Path):
    destination, last = CollectingDestination(), expected(root)[-1]

    def denied(event: Event) -> bool:
        if (event.position, event.ordinal) == last:
            raise DestinationDenied("the plan says so")
        return False

    destination.refused = denied
    with LoopRun(root, destination, batch=1) as loop, pytest.raises(DestinationDenied):
        drain(loop)

    assert places_of(destination.delivered) == [place for place in expected(root) if place[0] < last[0]]
