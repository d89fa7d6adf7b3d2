"""Lines of JSON: standard output with backpressure, and a connection with acknowledgements."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from cdc.config.destinations import SocketDelivery, StdoutDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity, Event
from cdc.delivery.destinations.lines import SocketDestination, StdoutDestination
from cdc.errors import DestinationUnavailable

IDENTITY = DeliveryIdentity("shop", "copy", "LOG")
STDOUT = StdoutDelivery.model_validate({"type": "stdout", "name": "copy"})


def event(number: int = 0, value: bytes | None = b"{}", key: bytes | None = None) -> Event:
    """An event."""
    return Event(f"LOG/0/1/{number}", 1, number, "t", key, value, (("cdc.id", b"x"),))


def test_standard_output_waits_for_its_reader():
    reading, writing = os.pipe()
    output = StdoutDestination(STDOUT, IDENTITY, writing)
    output.open()
    large = [event(n, b"x" * 50_000) for n in range(10)]
    sending = Thread(target=output.send, args=(large,))
    sending.start()

    received = b""
    while received.count(b"\n") < 10:
        received += os.read(reading, 1 << 16)
    sending.join()
    output.commit(b"")

    assert [json.loads(line)["id"] for line in received.splitlines()] == [one.id for one in large]
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        output.send(large)
    os.close(writing)


@pytest.fixture(name="server")
def _server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        yield server


def connected(server: socket.socket, **fields: Any) -> tuple[SocketDestination, socket.socket]:
    """A destination and the other end of its connection."""
    place = {"host": "127.0.0.1", "port": server.getsockname()[1]}
    settings = SocketDelivery.model_validate({"type": "tcp", "name": "copy", **place, **fields})
    destination = SocketDestination(settings, IDENTITY)
    destination.open()
    other, _ = server.accept()
    other.settimeout(10)
    return destination, other


def test_a_commit_waits_for_the_acknowledgement_of_each_event(server: socket.socket):
    destination, other = connected(server, acknowledge=True)
    destination.send([event(1), event(2)])
    other.sendall(b"LOG/0/1/1 taken\nLOG/0/1/2\n")
    destination.commit(b"")
    destination.send([event(3)])
    other.sendall(b"LOG/0/1/9\n")

    with pytest.raises(DestinationUnavailable, match="another event"):
        destination.commit(b"")
    destination.close()
    other.close()


def test_a_closed_connection_is_unavailable(server: socket.socket):
    destination, other = connected(server, acknowledge=True)
    destination.send([event(1)])
    other.close()

    with pytest.raises(DestinationUnavailable):
        destination.commit(b"")
    destination.close()


def test_closing_ends_the_connection_at_once(server: socket.socket):
    destination, other = connected(server)
    destination.send([event(1)])
    destination.close()

    received = b""
    while piece := other.recv(1 << 16):
        received += piece

    assert json.loads(received)["id"] == "LOG/0/1/1"
    other.close()


def test_nobody_there_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    settings = SocketDelivery.model_validate({"type": "tcp", "name": "copy", "host": "127.0.0.1", "port": port})

    with pytest.raises(DestinationUnavailable, match=f"127.0.0.1:{port}"):
        SocketDestination(settings, IDENTITY).open()
