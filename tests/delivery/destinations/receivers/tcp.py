"""TCP with acknowledgements: a process that writes each line to a file before it acknowledges the event."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from cdc.config.destinations import SocketDelivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import DeliveryIdentity
from tests.delivery.destinations.receivers import Received, Receiver
from tests.delivery.destinations.receivers.kinesis import received_line
from tests.fixtures.broker_process import BrokerProcess, own_broker

CRASH_POINTS: Final = ()
IDENTITY: Final = DeliveryIdentity("shop", "copy", "0123456789abcdef")


class LineServerProcess(BrokerProcess):
    """A receiver of lines."""

    program = sys.executable
    roles = ("plain",)

    def command(self) -> Sequence[str]:
        """It listens at one port, and appends to one file."""
        script = Path(__file__).parents[3] / "fixtures" / "line_server.py"
        return [self.program, str(script), str(self.ports["plain"]), str(self.lines)]

    def answers(self) -> bool:
        """It acknowledges an event."""
        return self.greeting(b'{"id": "any", "is": "no event"}\n') == b"any\n"

    @property
    def lines(self) -> Path:
        """What it has acknowledged."""
        return self.folder / "lines"


def received(file: Path) -> list[Received]:
    """Events that are in the file."""
    with file.open("rb") as lines:
        return [received_line(line) for line in lines if b"no event" not in line]


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with killable(request) as made:
        yield made


@contextmanager
def killable(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with own_broker(request.getfixturevalue("tmp_path") / "tcp", LineServerProcess) as server:
        place = {"host": "127.0.0.1", "port": server.ports["plain"], "acknowledge": True}
        delivery = SocketDelivery.model_validate({"type": "tcp", "name": "copy", **place})
        yield Receiver(
            partial(new_destination, delivery, IDENTITY),
            partial(received, server.lines),
            ("shop.orders", 'S."ödd" / table?\n'),
            missing={"stores progress": "a connection does not store progress"},
            server=server,
        )
