"""Requests to a delivery: pause, rewind and dead letters, and what happens without the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from cdc.catalog import Catalog, delivery_requests
from cdc.catalog.dead_letter_requests import DLQ
from cdc.catalog.delivery_requests import DELIVERY_PAUSES
from cdc.delivery.delivery_requests import DeliveryRequests
from cdc.delivery.progress import Progress
from cdc.failpoint import Abandoned
from tests.delivery.destinations.planned import PlannedDestination, nothing
from tests.delivery.loop_run import NAME, LoopRun, drain, places_of
from tests.delivery.sent_log import begin_log, change
from tests.fixtures.waiting import until
from tests.log.sample_log import ORDERS, commit_rows


class Sent:
    """A delivery with a parked key, and its requests."""

    def __init__(self, folder: Path) -> None:
        writer = begin_log(folder / "log")
        for position in (20, 30, 40):
            commit_rows(writer, change(ORDERS, position, 0, "1"), change(ORDERS, position, 1, "2"))
        self.catalog = Catalog.open(f"sqlite:///{folder}/catalog.db")
        self.destination = PlannedDestination()
        self.destination.refused = lambda event: event.position == 30 and event.ordinal == 0
        self.run = LoopRun(folder / "log", self.destination)
        self.requests = DeliveryRequests(self.catalog, "shop", NAME)

    def ask(self, verb: str) -> dict[str, str]:
        """Request an action on every dead letter, answer it, and return the outcomes."""
        ids = [letter.id for letter in self.run.figures.dead_letters()] or ["gone"]
        number = self.catalog.commands.post("shop", DLQ, {"sink": NAME, "verb": verb, "ids": ids})
        self.requests.answer(self.run.loop)
        command = self.catalog.commands.get(number)
        assert command is not None
        assert command.result is not None
        return dict(zip(ids, command.result["letters"].values(), strict=True))


@pytest.fixture(name="sent")
def _sent(tmp_path: Path) -> Iterator[Sent]:
    sent = Sent(tmp_path)
    with sent.run as loop:
        drain(loop)
        yield sent
    sent.catalog.close()


def test_a_retried_dead_letter_is_delivered_or_stays_parked(sent: Sent):
    assert list(sent.ask("retry").values()) == ["parked"]

    sent.destination.refused = nothing

    assert list(sent.ask("retry").values()) == ["applied"]
    assert sorted(places_of(sent.destination.delivered)) == [(p, n) for p in (20, 30, 40) for n in (0, 1)]
    assert sent.ask("retry") == {"gone": "gone"}


def test_a_discarded_dead_letter_is_gone(sent: Sent):
    assert list(sent.ask("discard").values()) == ["discarded"]
    assert sent.run.figures.dead_letters() == ()


def test_requests_to_another_sink_stay_pending(sent: Sent):
    number = sent.catalog.commands.post("shop", DLQ, {"sink": "lake", "verb": "retry", "ids": ["x"]})
    delivery_requests.request_rewind(sent.catalog, "shop", "other", "0/0", "ada")

    sent.requests.answer(sent.run.loop)

    assert [one.id for one in sent.catalog.commands.pending("shop", DLQ)] == [number]
    assert sent.run.loop.progress.position == 40


def test_a_rewind_and_a_pause_are_answered(sent: Sent):
    number = delivery_requests.request_rewind(sent.catalog, "shop", NAME, "0/14", "ada")
    DELIVERY_PAUSES.pause(sent.catalog, "shop", NAME, "ada")

    sent.requests.answer(sent.run.loop)

    assert sent.run.loop.progress.position == 20
    assert delivery_requests.await_rewind(sent.catalog, number, 0.0)
    assert sent.requests.is_paused
    assert sent.requests.pause_notice() == "paused: run 'cdc deliveries resume copy'"
    DELIVERY_PAUSES.resume(sent.catalog, "shop", NAME, "ada")
    sent.requests.answer(sent.run.loop)
    assert sent.requests.pause_notice() is None


def test_a_rewind_whose_process_died_before_it_was_answered_is_carried_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = Sent(tmp_path)
    first.destination.refused = nothing
    number = delivery_requests.request_rewind(first.catalog, "shop", NAME, "0/14", "ada")
    monkeypatch.setenv("CDC_FAILPOINT", "delivery_rewound:1:abandon")
    with first.run as loop:
        drain(loop)
        with pytest.raises(Abandoned):
            first.requests.answer(loop)
    monkeypatch.delenv("CDC_FAILPOINT")
    assert first.destination.stored is not None
    assert Progress.from_json(first.destination.stored).position == 20

    run = LoopRun(tmp_path / "log", first.destination)
    with run as loop:
        drain(loop)
        first.requests.answer(loop)
        assert delivery_requests.await_rewind(first.catalog, number, 0.0)
        assert loop.progress.position == 40
        delivery_requests.request_rewind(first.catalog, "shop", NAME, "0/14", "ada")
        first.requests.answer(loop)
        assert loop.progress.position == 20
    first.catalog.close()


def test_without_the_catalog_a_delivery_continues_and_stays_paused(sent: Sent, tmp_path: Path):
    DELIVERY_PAUSES.pause(sent.catalog, "shop", NAME, "ada")
    sent.requests.answer(sent.run.loop)
    (tmp_path / "catalog.db").rename(tmp_path / "away")
    (tmp_path / "catalog.db").mkdir()
    sent.catalog.close()

    sent.requests.answer(sent.run.loop)

    assert sent.requests.is_paused


def test_a_stopped_delivery_waits_for_a_request_that_is_new(sent: Sent):
    DELIVERY_PAUSES.pause(sent.catalog, "shop", NAME, "ada")
    found: list[bool] = []
    waiting = Thread(target=lambda: found.append(sent.requests.await_any(Event())))
    waiting.start()
    posted = 0

    def is_over() -> bool:
        nonlocal posted
        delivery_requests.request_rewind(sent.catalog, "shop", NAME, "0/0", "ada")
        posted += 1
        return not waiting.is_alive()

    until(is_over, "the end of the wait", every=0.5)
    assert found == [True]


def test_a_stopped_delivery_of_a_process_that_ends_waits_no_longer(sent: Sent):
    stop = Event()
    stop.set()

    assert not sent.requests.await_any(stop)
