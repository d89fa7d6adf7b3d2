"""StatsD: what a server gets of the lines of a batch."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from cdc.config.destinations import StatsdDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.destinations.statsd import StatsdDestination
from cdc.errors import DestinationUnavailable
from tests.delivery.destinations.sending import event


@pytest.fixture(name="server")
def _server() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind(("127.0.0.1", 0))
        made.settimeout(30)
        yield made


def destination(port: int, host: str = "127.0.0.1", datagram: int = 1432) -> StatsdDestination:
    settings = {"name": "counts", "type": "statsd", "host": host, "port": port, "datagram": datagram}
    metrics = [{"metric": "orders.placed", "table": "shop.*"}]
    model = StatsdDelivery.model_validate({**settings, "metrics": metrics})
    return StatsdDestination(model, DeliveryIdentity("shop", "counts", "0123456789abcdef"))


def send(made: StatsdDestination, *lines: str) -> None:
    made.send([event(number, "shop.orders", b"m", line.encode()) for number, line in enumerate(lines)])
    made.commit(b"1")


def test_counters_are_added_up_and_gauges_are_the_newest_value(server: socket.socket) -> None:
    made = destination(server.getsockname()[1])
    made.open()
    send(made, "a:1|c", "b:2.50|c", "a:3|c", "g:7|g", "b:0.25|c", "g:-4|g")
    made.close()

    assert server.recv(65536).decode().split("\n") == ["a:4|c", "b:2.75|c", "g:0|g", "g:-4|g"]


def test_a_batch_is_sent_by_its_commit_and_counted_once(server: socket.socket) -> None:
    made = destination(server.getsockname()[1])
    made.open()
    made.send([event(1, "shop.orders", b"m", b"a:1|c")])
    made.close()
    made.open()
    send(made, "a:1|c")
    send(made, "a:5|c")
    made.close()

    assert [server.recv(65536) for _ in range(2)] == [b"a:1|c", b"a:5|c"]


def test_datagrams_stay_below_their_limit(server: socket.socket) -> None:
    made = destination(server.getsockname()[1], datagram=256)
    made.open()
    sent = [f"{'m' * 20}{number:03}:1|c" for number in range(60)]
    send(made, *sent)
    made.close()
    received: list[str] = []
    while len(received) < 60:
        datagram = server.recv(65536)
        assert len(datagram) <= 256
        received += datagram.decode().split("\n")

    assert received == sent


def test_a_server_that_does_not_listen_loses_the_numbers_and_nothing_else(server: socket.socket) -> None:
    made = destination(server.getsockname()[1])
    server.close()
    made.open()
    for _ in range(3):
        send(made, "a:1|c")
    made.close()


def test_a_host_without_address_is_unavailable() -> None:
    with pytest.raises(DestinationUnavailable, match="cannot be found"):
        destination(1, host="host.invalid").open()
