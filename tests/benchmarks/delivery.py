"""Delivery: how many events per second the destinations send and commit, against the client library alone.

Both sides get the same prepared events, and send them to one broker, one after the other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

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
from cdc.delivery.destinations.kafka_client import producer_settings
from tests.benchmarks import delivery_encode, delivery_stream
from tests.benchmarks.figures import Figure
from tests.fixtures.kafka import KafkaServer

PARTS: Final = ("kafka", "log", "encode", "stream")
QUICK_PARTS: Final = PARTS[:3]
EVENTS, QUICK_EVENTS, WARM_EVENTS = 1_000_000, 100_000, 100_000
ENCODED, QUICK_ENCODED = 100_000, 10_000
"""Rows that are encoded in each format and encoding."""
BATCH: Final = 10_000
SECONDS, QUICK_SECONDS, WARM, QUICK_WARM = 60.0, 8.0, 10.0, 3.0
"""Seconds of load that are measured, and before."""
AWAY, QUICK_AWAY = 3_600.0, 60.0
"""Seconds of load that wait in the log when the delivery continues."""
KEYS: Final = 100_000
PARTITIONS: Final = 4
TEXT_BYTES: Final = 110
"""Of which two hexadecimal digits each are in a value, which has 300 bytes."""
BATCH_SIZE: Final = 1_000_000
"""Bytes of one request for a partition, as the destination sets it."""
JVM: Final = ("-Xms1g", "-Xmx1g")


def run(*, quick: bool, changes: int = 0, runs: int = 0, parts: Sequence[str] = ()) -> tuple[int, dict[str, Figure]]:
    """Return (runs, figures by key); parts that are not asked for stay unmeasured."""
    runs, parts = runs or (1 if quick else 3), parts or (QUICK_PARTS if quick else PARTS)
    number = changes or (QUICK_EVENTS if quick else EVENTS)
    load = (QUICK_WARM, QUICK_SECONDS, QUICK_AWAY) if quick else (WARM, SECONDS, AWAY)
    figures = empty_figures()
    prepared = list(events(number)) if "kafka" in parts else []
    for _ in range(runs):
        found: dict[str, float] = {}
        if "kafka" in parts:
            found |= _kafka(prepared)
        if "log" in parts:
            found |= _log(number)
        if "encode" in parts:
            found |= delivery_encode.measure(QUICK_ENCODED if quick else ENCODED)
        if "stream" in parts:
            found |= _stream(load)
        for key, value in found.items():
            figures[key].values.append(value)
    return runs, figures


def empty_figures() -> dict[str, Figure]:
    """Return the figures without values."""
    return {
        "kafka_events_per_second": Figure("events/s", at_least=60_000),
        "kafka_vs_producer": Figure("ratio", at_least=0.7),
        "kafka_p50_ms": Figure("ms", at_most=250),
        "kafka_p99_ms": Figure("ms", at_most=700),
        "stream_changes_per_second": Figure(
            "changes/s", at_least=delivery_stream.REACHED * 4 * delivery_stream.RATE, in_every_run=True
        ),
        "catch_up_ratio": Figure("ratio", at_least=10),
        "delivery_mib": Figure("MiB", at_most=300),
        "destination_vs_producer.kafka": Figure("ratio"),
        "destination_events_per_second.kafka": Figure("events/s"),
        "producer_events_per_second.kafka": Figure("events/s"),
        "producer_events_per_second.log": Figure("events/s"),
        **delivery_encode.figures(),
        "catch_up_seconds": Figure("s"),
        "catch_up_events": Figure("events"),
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


@contextmanager
def _broker() -> Iterator[tuple[Path, str]]:
    """Yield a folder, and the address of a broker in it."""
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as folder:
        Path(folder).chmod(0o755)  # Postgres runs as another user
        server = KafkaServer(Path(folder, "kafka"), jvm=JVM)
        server.start()
        try:
            yield Path(folder), server.address.plain
        finally:
            server.kill()


def _create_topic(address: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": address})  # it ends its requests when it is collected
    admin.create_topics([NewTopic(name, PARTITIONS)])[name].result(30)


def _kafka(prepared: Sequence[Event]) -> dict[str, float]:
    with _broker() as (_, address):
        _create_topic(address, prepared[0].topic)
        sides: tuple[Callable[[str, Sequence[Event]], float], ...] = (_ours, _peer)
        for side in sides:  # the JVM compiles what both sides use
            side(address, prepared[:WARM_EVENTS])
        # a slow change of the machine or of the JVM is the same for both sides
        seconds = [side(address, prepared) for side in (_ours, _peer, _peer, _ours)]
    ours, peer = seconds[0] + seconds[3], seconds[1] + seconds[2]
    return {
        "destination_events_per_second.kafka": 2 * len(prepared) / ours,
        "producer_events_per_second.kafka": 2 * len(prepared) / peer,
        "destination_vs_producer.kafka": peer / ours,
    }


def _log(changes: int) -> dict[str, float]:
    """Measure a process that sends a log to Kafka, between two runs of the client library with the same events."""
    with _broker() as (folder, address):
        delivery_stream.sent_log(folder / "warm", address, WARM_EVENTS)
        prepared = delivery_stream.events_of(folder / "warm")
        _create_topic(address, "peer.items")
        same = [event._replace(topic="peer.items") for event in prepared]
        repeats = max(1, changes // len(same))
        before = _peer(address, same, repeats)
        ours = delivery_stream.sent_log(folder / "log", address, changes)
        after = _peer(address, same, repeats)
    speed, producer_speed = ours["events"] / ours["seconds"], 2 * repeats * len(same) / (before + after)
    return {
        "kafka_events_per_second": speed,
        "producer_events_per_second.log": producer_speed,
        "kafka_vs_producer": speed / producer_speed,
        "delivery_mib": ours["mib"],
    }


def _stream(load: tuple[float, float, float]) -> dict[str, float]:
    with _broker() as (folder, address):
        return delivery_stream.measure_stream(folder / "stream", address, load)


def _settings(address: str) -> KafkaDelivery:
    return KafkaDelivery.model_validate({"type": "kafka", "name": "to_kafka", "servers": [address]})


def _ours(address: str, prepared: Sequence[Event]) -> float:
    """Return the seconds in which the destination sends and commits the events, as often as the loop commits."""
    destination = KafkaDestination(_settings(address), DeliveryIdentity("bench", "to_kafka", "0123456789abcdef"))
    batches = [prepared[first : first + BATCH] for first in range(0, len(prepared), BATCH)]
    destination.open()
    began = committed = time.perf_counter()
    for batch in batches:
        destination.send(batch)
        if batch is batches[-1] or time.perf_counter() - committed >= destination.collect_seconds:
            destination.commit(b"%d" % batch[-1].position)
            committed = time.perf_counter()
    seconds = time.perf_counter() - began
    destination.close()
    return seconds


def peer_settings(settings: KafkaDelivery) -> dict[str, Any]:
    """Return the settings of the producer of the client library: those of ours that decide about acknowledgements,
    order, compression and sizes, and no transactions.
    """
    ours = producer_settings(settings, "", BATCH_SIZE)
    return {
        "bootstrap.servers": settings.servers[0],
        "enable.idempotence": True,
        "acks": "all",
        **{name: value for name, value in ours.items() if not name.startswith("transaction")},
    }


def _peer(address: str, prepared: Sequence[Event], repeats: int = 1) -> float:
    """Return the seconds in which one producer of the client library sends the events, several times over."""
    headers = [list(event.headers) for event in prepared]
    began = time.perf_counter()
    producer = Producer(peer_settings(_settings(address)))
    for _ in range(repeats):
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
