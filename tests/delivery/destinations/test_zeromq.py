"""ZeroMQ: subscribers that lose events get them again from the log, complete and in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Event as Flag
from threading import Thread
from typing import Any

import pytest
import zmq
from pydantic import ValidationError

from cdc.config.destinations import ZeromqDelivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import Destination, Event, ServesHistory
from cdc.delivery.destinations.zeromq import ZeromqDestination
from cdc.errors import DestinationUnavailable
from tests.delivery.destinations.receivers import zeromq
from tests.delivery.destinations.recorded import example, recorded
from tests.delivery.destinations.sending import Assignment, numbered, run_process

TOPICS = ("shop.orders", "shop.items")


@pytest.fixture(name="folder")
def _folder() -> Iterator[str]:
    """A folder with a path that is short enough for a socket."""
    with TemporaryDirectory(prefix="zmq", dir="/tmp") as made:
        yield made


def destination(folder: str, **given: Any) -> Destination:
    make = partial(new_destination, zeromq.delivery(folder, **given), zeromq.IDENTITY)
    return recorded(make, Path(folder, "events"))


def relay(folder: str, share: float, ended: Flag, ready: Flag) -> None:
    """Pass messages on, without a share of them."""
    random, context = Random(11), zmq.Context()
    given, sent = context.socket(zmq.SUB), context.socket(zmq.PUB)
    given.connect(f"ipc://{folder}/publish")
    given.subscribe(b"")
    sent.bind(f"ipc://{folder}/relayed")
    ready.set()
    while not ended.is_set():
        if given.poll(20):
            message = given.recv_multipart()
            if random.random() >= share:
                sent.send_multipart(message)
    context.destroy(linger=0)


def check_each_topic(got: Sequence[Any], sent: Sequence[Event]) -> None:
    """Each event is there once, those of a topic in order."""
    for topic in TOPICS:
        assert [one.id for one in got if one.topic == topic] == [one.id for one in sent if one.topic == topic]


def test_a_subscriber_that_loses_messages_has_each_event_once_and_in_order(folder: str) -> None:
    ended, ready = Flag(), Flag()
    lossy = Thread(target=relay, args=(folder, 0.2, ended, ready))
    lossy.start()
    ready.wait(10)
    made = destination(folder)
    made.open()
    subscriber = example("zeromq_subscriber").Subscriber(f"ipc://{folder}/relayed", f"ipc://{folder}/history")
    sent, got = numbered(range(400), TOPICS), []
    for first in range(0, 400, 40):
        made.send(sent[first : first + 40])
        made.commit(b"")
        got += list(subscriber.poll(0.02))
    ended.set()
    lossy.join()
    subscriber.close()
    made.close()

    check_each_topic(got, sent)


def test_a_prefix_selects_topics_live_and_from_the_log(folder: str) -> None:
    made = destination(folder)
    made.open()
    sent = numbered(range(20), TOPICS)
    made.send(sent[:10])
    places = f"ipc://{folder}/publish", f"ipc://{folder}/history"
    subscriber = example("zeromq_subscriber").Subscriber(*places, "shop.orders")
    got = list(subscriber.poll(0.1))
    made.send(sent[10:])
    got += subscriber.poll(0.1)
    later = example("zeromq_subscriber").Subscriber(*places, "shop.orders", sent[12].id)
    got_later = list(later.poll(0.1))
    for one in (subscriber, later):
        one.close()
    made.close()

    expected = [one.id for one in sent if one.topic == "shop.orders"]
    assert [one.id for one in got] == expected
    assert [one.id for one in got_later] == [one.id for one in sent[13:] if one.topic == "shop.orders"]


def test_an_address_that_is_used_is_an_unavailable_destination(folder: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        made = destination(folder, publish=f"tcp://127.0.0.1:{port}")
        with pytest.raises(DestinationUnavailable, match="cannot listen"):
            made.open()
        made.close()


def test_a_request_that_cannot_be_answered_gets_an_error(folder: str) -> None:
    made = ZeromqDestination(zeromq.delivery(folder), zeromq.IDENTITY)
    assert isinstance(made, ServesHistory)
    made.open()
    module = example("zeromq_subscriber")
    subscriber = module.Subscriber(f"ipc://{folder}/publish", f"ipc://{folder}/history")
    with pytest.raises(module.HistoryFailed, match="CDC-7001"):
        list(subscriber.catch_up())
    subscriber.close()
    made.close()


def test_other_machines_get_events_only_if_the_definition_says_so() -> None:
    places = {"publish": "tcp://*:5556", "history": "tcp://*:5557"}
    with pytest.raises(ValidationError, match="insecure_plaintext"):
        ZeromqDelivery.model_validate({"name": "live", "type": "zeromq", **places})
    ZeromqDelivery.model_validate({"name": "live", "type": "zeromq", **places, "insecure_plaintext": True})


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_nothing_is_missing_after_many_kills(folder: str, kills: int, tmp_path: Path) -> None:
    settings = zeromq.delivery(folder)
    make = partial(recorded, partial(new_destination, settings, zeromq.IDENTITY), Path(folder, "events"))
    module = example("zeromq_subscriber")
    subscriber = module.Subscriber(settings.publish, settings.history)
    subscriber.answer_seconds = 0.5
    given = Assignment(make, TOPICS, 40 * (kills + 1), 20, tmp_path / "progress")
    points = ("batch_half_sent:2", "zeromq_sent:2", "batch_sent:1", "batch_committed:1")
    for number in range(kills):
        run_process(given, points[number % len(points)])
    run_process(given)
    reader = zeromq.LiveReader(subscriber, make, module.HistoryFailed)
    got = reader()
    subscriber.close()

    check_each_topic(got, numbered(range(given.events), TOPICS))
