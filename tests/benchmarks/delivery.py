"""Delivery: how many events per second the destinations send and commit, against the client library alone.

Both sides get the same prepared events, and send them to one broker, one after the other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Final

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from cdc.config.destinations import KafkaDelivery
from cdc.delivery.destinations.contract import (
    ID_HEADER,
    POSITION_HEADER,
    XID_HEADER,
    DeliveryIdentity,
    Event,
)
from cdc.delivery.destinations.kafka import KafkaDestination
from tests.benchmarks.figures import Figure
from tests.fixtures.kafka import KafkaServer

PARTS: Final = ("kafka",)
EVENTS, QUICK_EVENTS, WARM_EVENTS = 1_000_000, 100_000, 100_000
BATCH: Final = 10_000
KEYS: Final = 100_000
PARTITIONS: Final = 4
TEXT_BYTES: Final = 110
"""Of which two hexadecimal digits each are in a value, which has 300 bytes."""
JVM: Final = ("-Xms1g", "-Xmx1g")


def run(*, quick: bool, changes: int = 0, runs: int = 0, parts: Sequence[str] = ()) -> tuple[int, dict[str, Figure]]:
    """Return (runs, figures by key); parts that are not asked for stay unmeasured."""
    runs, parts = runs or (1 if quick else 3), parts or PARTS
    figures = _figures()
    prepared = list(events(changes or (QUICK_EVENTS if quick else EVENTS)))
    for _ in range(runs if "kafka" in parts else 0):
        for key, value in _kafka(prepared):
            figures[key].values.append(value)
    return runs, figures


def _figures() -> dict[str, Figure]:
    return {
        "kafka_vs_producer": Figure("ratio", at_least=0.7),
        "destination_events_per_second.kafka": Figure("events/s"),
        "producer_events_per_second.kafka": Figure("events/s"),
    }


def events(number: int) -> Iterator[Event]:
    """Yield events whose values are JSON, which compresses, around text, which does not."""
    random = Random(7)
    for position in range(number):
        name = f"0123456789abcdef/{position}/0"
        headers = ((ID_HEADER, name.encode()), (POSITION_HEADER, b"%d" % position), (XID_HEADER, b"%d" % position))
        key = b'{"id":%d}' % random.randrange(KEYS)
        text = random.randbytes(TEXT_BYTES).hex().encode()
        value = b'{"op":"u","position":%d,"after":{"name":"%s","quantity":"%d"},"before":null}' % (
            position,
            text,
            position,
        )
        yield Event(name, position, 0, "bench.orders", key, value, headers)


def _kafka(prepared: Sequence[Event]) -> Iterator[tuple[str, float]]:
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as folder:
        server = KafkaServer(Path(folder, "kafka"), jvm=JVM)
        server.start()
        try:
            address = server.address.plain
            topic = NewTopic(prepared[0].topic, PARTITIONS)
            admin = AdminClient({"bootstrap.servers": address})
            admin.create_topics([topic])[topic.topic].result(30)
            sides: tuple[Callable[[str, Sequence[Event]], float], ...] = (_ours, _peer)
            for side in sides:  # the JVM compiles what both sides use
                side(address, prepared[:WARM_EVENTS])
            # a slow change of the machine or of the JVM is the same for both sides
            seconds = [side(address, prepared) for side in (_ours, _peer, _peer, _ours)]
        finally:
            server.kill()
    ours, peer = seconds[0] + seconds[3], seconds[1] + seconds[2]
    yield "destination_events_per_second.kafka", 2 * len(prepared) / ours
    yield "producer_events_per_second.kafka", 2 * len(prepared) / peer
    yield "kafka_vs_producer", peer / ours


def _settings(address: str) -> KafkaDelivery:
    return KafkaDelivery.model_validate({"type": "kafka", "name": "to_kafka", "servers": [address]})


def _ours(address: str, prepared: Sequence[Event]) -> float:
    """Return the seconds in which the destination sends and commits the events."""
    destination = KafkaDestination(_settings(address), DeliveryIdentity("bench", "to_kafka", "0123456789abcdef"))
    batches = [prepared[first : first + BATCH] for first in range(0, len(prepared), BATCH)]
    destination.open()
    began = time.perf_counter()
    for batch in batches:
        destination.send(batch)
        destination.commit(b"%d" % batch[-1].position)
    seconds = time.perf_counter() - began
    destination.close()
    return seconds


def _peer(address: str, prepared: Sequence[Event]) -> float:
    """Return the seconds in which the client library sends the events."""
    settings = _settings(address)
    producer = Producer(
        {
            "bootstrap.servers": address,
            "enable.idempotence": True,
            "compression.type": settings.compression,
            "linger.ms": settings.linger * 1000,
        }
    )
    headers = [list(event.headers) for event in prepared]
    began = time.perf_counter()
    for event, shown in zip(prepared, headers, strict=True):
        while True:
            try:
                producer.produce(event.topic, event.value, event.key, headers=shown)
            except BufferError:
                producer.poll(0.1)
            else:
                break
    assert producer.flush(60) == 0
    return time.perf_counter() - began
