"""The destination at NATS JetStream: streams that are missing or refuse events, and events that are sent again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import nats as nats_client
import pytest

from cdc.config.secret import Secret
from cdc.delivery.destinations.contract import Event, EventsRefused
from cdc.delivery.destinations.nats import header_name, subject_of
from cdc.errors import (
    CdcError,
    DestinationDenied,
    DestinationFull,
    DestinationUnavailable,
    EventRefused,
    EventTooLarge,
    TopicMissing,
)
from tests.delivery.destinations.receivers import nats
from tests.delivery.destinations.sending import event, numbered
from tests.fixtures.broker_process import PASSWORD, USER, own_broker
from tests.fixtures.brokers import NatsProcess


@pytest.fixture(name="port")
def _port(nats: NatsProcess) -> int:
    return nats.ports["plain"]


@pytest.fixture(name="name")
def _name() -> str:
    return uuid4().hex


def deliver(port: int, name: str, *events: Event, **changed: object) -> CdcError | EventsRefused | None:
    """Send events in one batch; the error that comes."""
    destination = nats.make(port, name, **changed)
    try:
        destination.open()
        destination.send(events)
        destination.commit(b"")
    except (CdcError, EventsRefused) as error:
        return error
    finally:
        destination.close()
    return None


def add_stream(port: int, **config: Any) -> None:
    async def add() -> None:
        client = await nats_client.connect(f"nats://127.0.0.1:{port}", user=USER, password=PASSWORD)
        await client.jetstream(timeout=30).add_stream(**config)
        await client.close()

    asyncio.run(add())


def test_an_event_that_is_sent_again_is_there_once(port: int, name: str) -> None:
    sent = numbered(range(30), [f"{name}.a", f"{name}.b"])
    errors = [deliver(port, name, *sent[:20]), deliver(port, name, *sent)]

    assert errors == [None, None]
    assert sorted(one.id for one in nats.received(port, name)) == sorted(one.id for one in sent)


def test_a_subject_without_a_stream_is_missing(port: int, name: str) -> None:
    sent = numbered(range(20), [f"{name}.a"])
    missing = deliver(port, name, *sent, create=False, stream=None, subjects=[])
    add_stream(port, name=name, subjects=[f"{name}.>"])
    again = deliver(port, name, *sent, create=False)

    assert isinstance(missing, TopicMissing)
    assert again is None
    assert len(nats.received(port, name)) == 20


def test_a_subject_of_another_stream_is_missing(port: int, name: str) -> None:
    add_stream(port, name=f"{name}-2", subjects=[f"{name}.>"])
    error = deliver(port, name, event(1, f"{name}.a", b"k", b"x"), create=False)

    assert isinstance(error, TopicMissing)
    assert name in str(error)


def test_an_event_that_the_stream_refuses_stops_its_key(port: int, name: str) -> None:
    add_stream(port, name=name, subjects=[f"{name}.>"], max_msg_size=2_000)
    topic = f"{name}.a"
    sent = [event(1, topic, b"a", b"1"), event(2, topic, b"b", b"x" * 3_000), event(3, topic, b"b", b"3")]
    sent += [event(4, topic, b"a", b"4")]
    error = deliver(port, name, *sent, create=False)

    assert isinstance(error, EventsRefused)
    assert {one: type(reason) for one, reason in error.refused.items()} == {sent[1].id: EventTooLarge}
    assert [one.id for one in nats.received(port, name)] == [sent[0].id, sent[3].id]


def test_a_full_stream_makes_the_delivery_wait(port: int, name: str) -> None:
    add_stream(port, name=name, subjects=[f"{name}.>"], max_msgs=5, discard="new")
    sent = numbered(range(10), [f"{name}.a"])
    error = deliver(port, name, *sent, create=False)

    assert isinstance(error, DestinationFull)
    assert "maximum messages exceeded" in str(error)


class NarrowNats(NatsProcess):
    """Lets the user publish only subjects that begin with `open.`, and manage streams."""

    def command(self) -> Sequence[str]:
        command = super().command()
        file = self.folder / "nats.conf"
        allowed = 'permissions: {publish: ["open.>", "$JS.API.>"]}'
        users = f'authorization: {{users: [{{user: "{USER}", password: "{PASSWORD}", {allowed}}}]}}'
        lines = [users if line.startswith("authorization") else line for line in file.read_text().splitlines()]
        file.write_text("\n".join(lines))
        return command


def test_a_subject_that_the_user_may_not_publish_is_denied(tmp_path: Path) -> None:
    with own_broker(tmp_path, NarrowNats) as server:
        port = server.ports["plain"]
        fields = {"stream": "all", "subjects": ["open.>", "closed.>"]}
        allowed = deliver(port, "all", event(1, "open.a", b"k", b"x"), **fields)
        refused = deliver(port, "all", event(1, "closed.a", b"k", b"x"), timeout="3s", **fields)

    assert allowed is None
    assert type(refused) is DestinationDenied


def test_an_empty_topic_is_refused(port: int, name: str) -> None:
    error = deliver(port, name, event(1, "", b"k", b"x"))

    assert isinstance(error, EventsRefused)
    assert [type(reason) for reason in error.refused.values()] == [EventRefused]


def test_a_header_that_the_server_would_obey_is_renamed() -> None:
    assert header_name("Nats-Rollup") == "%4Eats-Rollup"
    assert header_name("nats-rollup") == "%6Eats-rollup"
    assert header_name("Größe") == "Gr%C3%B6%C3%9Fe"


def test_subjects_of_the_server_are_not_reached() -> None:
    assert subject_of("$JS.API.STREAM.PURGE.x") == "%24JS.API.STREAM.PURGE.x"
    assert subject_of("_INBOX.x") == "%5FINBOX.x"


@pytest.fixture(name="listener")
def _listener() -> Iterator[tuple[int, list[bytes]]]:
    """A server that says that it has no TLS, and keeps what it gets."""
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=_listen, args=(server, got), daemon=True).start()
        yield server.getsockname()[1], got


def _listen(server: socket.socket, got: list[bytes]) -> None:
    connection, _ = server.accept()
    with connection:
        connection.sendall(b'INFO {"max_payload": 1048576, "auth_required": true, "headers": true}\r\n')
        while received := connection.recv(4096):
            got.append(received)


def test_a_server_without_tls_does_not_get_the_password(listener: tuple[int, list[bytes]], name: str) -> None:
    port, got = listener
    secret = Secret("very secret", "${BROKER_PASSWORD}")
    error = deliver(port, name, url=f"tls://127.0.0.1:{port}", password=secret, timeout="3s")

    assert isinstance(error, DestinationUnavailable)
    assert "TLS" in str(error)
    assert b"very secret" not in b"".join(got)
