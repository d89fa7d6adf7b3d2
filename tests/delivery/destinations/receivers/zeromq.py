"""ZeroMQ as the tests of the contract use it: the subscriber of the examples, connected before the first event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

from cdc.config.destinations import ZeromqDelivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import DeliveryIdentity, Destination
from tests.delivery.destinations.receivers import Received, Receiver
from tests.delivery.destinations.recorded import example, recorded

CRASH_POINTS: Final = ("zeromq_sent",)
IDENTITY: Final = DeliveryIdentity("shop", "live", "0123456789abcdef")


def delivery(folder: str, **given: Any) -> ZeromqDelivery:
    """A delivery to sockets in a folder, whose path has to be short."""
    places = {"publish": f"ipc://{folder}/publish", "history": f"ipc://{folder}/history"}
    return ZeromqDelivery.model_validate({"name": "live", "type": "zeromq", **places, **given})


class LiveReader:
    """Reads what the subscriber has got; opens the destination for the history if no process has done so."""

    def __init__(self, subscriber: Any, make: Any, failure: type[Exception]) -> None:
        self._subscriber, self._make, self._failure = subscriber, make, failure
        self._read: list[Received] = []

    def __call__(self) -> list[Received]:
        try:
            self._poll()
        except self._failure:
            server: Destination = self._make()
            server.open()
            self._poll()
            server.close()
        return self._read

    def _poll(self) -> None:
        for one in self._subscriber.poll(0.05):
            self._read.append(Received(one.id, one.topic, one.key, one.value, one.headers))


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    module = example("zeromq_subscriber")
    with TemporaryDirectory(prefix="zmq", dir="/tmp") as folder:
        settings = delivery(folder)
        make = partial(recorded, partial(new_destination, settings, IDENTITY), Path(folder, "events"))
        subscriber = module.Subscriber(settings.publish, settings.history)
        subscriber.answer_seconds = 0.5
        yield Receiver(
            make,
            LiveReader(subscriber, make, module.HistoryFailed),
            ("shop.orders", 'S."ödd" / table?\n'),
            missing={"stores progress": "a socket does not store progress"},
        )
        subscriber.close()
