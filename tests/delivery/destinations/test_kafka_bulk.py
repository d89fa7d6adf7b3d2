"""Events that are passed to the Kafka client many at a time arrive as they are, from columns and from lists."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from cdc.delivery.destinations.contract import ID_HEADER, POSITION_HEADER, XID_HEADER, Event, EventsRefused
from cdc.delivery.destinations.event_columns import EventColumns, EventFields
from cdc.delivery.destinations.kafka import KafkaDestination
from cdc.delivery.destinations.kafka_bulk import AT_ONCE
from cdc.errors import CdcError, EventTooLarge
from tests.delivery.destinations.receivers.kafka import LARGEST, admin_client, committed, delivery, identity
from tests.delivery.destinations.test_kafka import create
from tests.fixtures.kafka import SharedKafka


def columns(
    topics: Sequence[str], contents: Sequence[tuple[bytes | None, bytes | None]], kind: pa.DataType
) -> EventFields:
    """Fields of one event for each key and value; three events are a transaction, and topics take turns."""
    count = len(contents)
    numbers = np.arange(count)
    transactions = range(-(-count // 3))
    return EventFields(
        ids=pa.array([f"L/{number // 3}/{number % 3}" for number in range(count)], pa.string()),
        positions=numbers // 3,
        ordinals=numbers % 3,
        topics=topics,
        topic_numbers=numbers % len(topics),
        keys=pa.array([key for key, _ in contents], kind),
        values=pa.array([value for _, value in contents], kind),
        transactions=numbers // 3,
        position_texts=pa.array([b"0/%X" % one for one in transactions], pa.binary()),
        xid_texts=pa.array([b"%d" % (700 + one) for one in transactions], pa.binary()),
    )


def opened(kafka: SharedKafka, **settings: object) -> KafkaDestination:
    made = KafkaDestination(delivery(kafka.address.plain, **settings), identity(kafka.prefix))
    made.open()
    return made


def deliver(destination: KafkaDestination, fields: EventFields) -> None:
    destination.send(EventColumns(fields))
    destination.commit(b"done")


def random_contents(number: int) -> list[tuple[bytes | None, bytes | None]]:
    random = Random(3)
    return [
        (
            random.choice([None, b"", b"k%d" % random.randrange(9)]),
            random.choice([None, b"", random.randbytes(random.randrange(2_000))]),
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()], ids=str)
@pytest.mark.parametrize("number", [0, 1, AT_ONCE, 2 * AT_ONCE + 7])
def test_a_consumer_gets_every_event_as_it_is(kafka: SharedKafka, kind: pa.DataType, number: int) -> None:
    topics = [f"{kafka.prefix}{name}" for name in ("a", "bb", "ccc")]
    # a part of larger arrays, so that their offsets do not begin with 0
    fields = columns(topics, random_contents(number + 5), kind).slice(5, number + 5)
    with closing(opened(kafka, topics={"partitions": 1})) as destination:
        deliver(destination, fields)

    expected = fields.events()
    found = committed(kafka.address.plain, kafka.prefix)
    for topic in topics:
        assert [(one.id, one.key, one.value, one.headers) for one in found if one.topic == topic] == [
            (event.id, event.key, event.value, event.headers) for event in expected if event.topic == topic
        ]


@pytest.mark.parametrize("are_columns", [True, False])
def test_events_may_have_any_number_of_headers(kafka: SharedKafka, are_columns: bool) -> None:
    names = ["content-type", "a", "ü"]
    further = [tuple((name, b"%d\0" % number) for name in names[: number % 4]) for number in range(2 * AT_ONCE)]
    fields = replace(
        columns([f"{kafka.prefix}a", f"{kafka.prefix}b"], random_contents(2 * AT_ONCE), pa.binary()),
        more_headers=further,
    )
    with closing(opened(kafka, topics={"partitions": 1})) as destination:
        destination.send(EventColumns(fields) if are_columns else fields.events())
        destination.commit(b"done")

    found = {one.id: (one.key, one.value, one.headers) for one in committed(kafka.address.plain, kafka.prefix)}
    assert found == {event.id: (event.key, event.value, event.headers) for event in fields.events()}


def test_no_event_is_made(kafka: SharedKafka) -> None:
    events = EventColumns(columns([f"{kafka.prefix}a"], [(b"k", b"v")] * 10, pa.binary()))
    with closing(opened(kafka)) as destination:
        destination.send(events)
        destination.commit(b"done")

    assert events.fields is not None
    assert len(committed(kafka.address.plain, kafka.prefix)) == 10


def test_the_client_waits_for_room(kafka: SharedKafka) -> None:
    topic, number = f"{kafka.prefix}a", 220_000
    fields = columns([topic], [(b"key", b"%d" % one) for one in range(number)], pa.binary())
    with closing(opened(kafka, topics={"partitions": 1}, linger="1s")) as destination:
        deliver(destination, fields)

    assert [int(one.value or b"") for one in committed(kafka.address.plain, topic)] == [*range(number)]


def test_an_event_that_is_too_large_for_the_client_is_refused_and_the_others_are_known(kafka: SharedKafka) -> None:
    contents = [(b"k", b"v"), (b"k", b"x" * (LARGEST + 1)), (b"k", b"v")]
    fields = columns([f"{kafka.prefix}a"], contents, pa.binary())
    with closing(opened(kafka)) as destination, pytest.raises(EventsRefused) as refused:
        destination.send(EventColumns(fields))

    assert {name: type(reason) for name, reason in refused.value.refused.items()} == {"L/0/1": EventTooLarge}


def test_an_event_that_a_broker_refuses_is_found_when_the_batch_comes_again(kafka: SharedKafka) -> None:
    topic = f"{kafka.prefix}a"
    create(admin_client(kafka.address.plain), topic, cleanup_policy="compact")
    fields = columns([topic], [(b"k%d" % one if one != 5 else None, b"v") for one in range(9)], pa.binary())
    destination, attempts = opened(kafka), list[dict[str, CdcError]]()
    while not attempts or not attempts[-1]:
        with pytest.raises(EventsRefused) as refused:
            deliver(destination, fields)
        attempts.append(dict(refused.value.refused))
        destination.close()
        progress = destination.open()
    destination.send([event for event in fields.events() if event.id not in attempts[-1]])
    destination.commit(b"done")
    deliver(destination, fields.slice(0, 1))  # as columns again
    destination.close()

    assert (attempts, progress) == ([{}, attempts[-1]], None)
    assert [*attempts[-1]] == ["L/1/2"]
    found = [one.id for one in committed(kafka.address.plain, topic)]
    assert found == [event.id for event in fields.events() if event.ordinal != 2 or event.position != 1] + ["L/0/0"]


def test_headers_are_those_of_the_contract(kafka: SharedKafka) -> None:
    fields = columns([f"{kafka.prefix}a"], [(b"k", b"v")], pa.binary())
    with closing(opened(kafka)) as destination:
        deliver(destination, fields)

    ((one,),) = [committed(kafka.address.plain, kafka.prefix)]
    assert one.headers == ((ID_HEADER, b"L/0/0"), (POSITION_HEADER, b"0/0"), (XID_HEADER, b"700"))
    assert isinstance(fields.events()[0], Event)
