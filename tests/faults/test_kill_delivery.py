"""kill -9 of a delivery process while a reader captures a workload: each event once and in order in files, and none
missing over a connection.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cdc.demo.shop_workload import Workload, make_shop
from cdc.log.reader import LogReader
from cdc.log_row import ROW_OPERATIONS
from cdc.position import Position
from tests.delivery.destinations.receivers.kafka import committed
from tests.fixtures.kafka import SharedKafka
from tests.fixtures.pipeline import Pipeline, delete_old_orders

KILLED = -signal.SIGKILL
Place = tuple[Position, int]
BROKEN = 3
"""Number of connections that a receiver breaks."""
KAFKA_FAILPOINTS = ["delivery_sent:2", "kafka_flushed:2", "kafka_committed:2", "delivery_acknowledged:2"]
FAILPOINTS = ["delivery_sent:2", "file_written:2", "delivery_acknowledged:2", "file_written:1", "delivery_sent:1"]
_SENT = {one.value for one in ROW_OPERATIONS} | {"t"}


@pytest.fixture(name="shop")
def _shop(pipeline: Pipeline) -> Iterator[tuple[Pipeline, Workload]]:
    make_shop(pipeline.dsn)
    delete_old_orders(pipeline.dsn)
    workload = Workload(pipeline.dsn, rate=50.0, seed=7)
    yield pipeline, workload
    workload.stop()


def write(pipeline: Pipeline, **delivery: Any) -> None:
    """Write a definition with one delivery."""
    pipeline.write()
    settings = {"name": "copy", "batch": 200, "path": str(pipeline.folder / "out"), "type": "file"} | delivery
    if settings["type"] != "file":
        del settings["path"]
    with pipeline.definition.open("a") as file:
        file.write(f"deliveries: [{json.dumps(settings)}]\n")


def place_of(identity: str) -> Place:
    """Position and ordinal in the id of an event."""
    _, position, ordinal = identity.split("/", 1)[0], *identity.split("/", 1)[1].rsplit("/", 1)
    return Position.parse(position), int(ordinal)


def places_in_files(folder: Path) -> list[Place]:
    """The events of the files, in order; every line is complete."""
    lines = [line for file in sorted(folder.glob("copy-*.jsonl")) for line in file.read_bytes().splitlines()]
    return [place_of(json.loads(line)["id"]) for line in lines]


def places_in_log(pipeline: Pipeline) -> list[Place]:
    """Every change of the log that is an event, in order."""
    log = LogReader(pipeline.log)
    rows = (one for batch in log.rows(Position(0), log.durable or Position(0)) for one in batch.to_pylist())
    return sorted((Position(one["position"]), one["ordinal"]) for one in rows if one["op"] in _SENT)


def deliver_and_kill(pipeline: Pipeline, workload: Workload, failpoints: Sequence[str]) -> None:
    """Run one process per failpoint, which is killed there, and then one until the workload has ended."""
    pipeline.reader()
    workload.start()
    for failpoint in failpoints:
        assert pipeline.start("cdc", "deliver", failpoint=failpoint).wait(60) == KILLED, pipeline.output()
    pipeline.start("cdc", "deliver")
    pipeline.wait_for_more(workload, 30)
    workload.stop()


def assert_delivered(pipeline: Pipeline) -> None:
    """Wait until the files have the last change, then compare."""
    pipeline.settle()
    expected = places_in_log(pipeline)
    folder = pipeline.folder / "out"
    pipeline.wait(lambda: len(places_in_files(folder)) >= len(expected), "every event in the files")

    found = places_in_files(folder)

    assert {place: n for place, n in Counter(found).items() if n > 1} == {}, pipeline.output()
    assert found == expected, pipeline.output()


def test_a_delivery_killed_at_one_failpoint_after_the_other_has_each_event_once_and_in_order(
    shop: tuple[Pipeline, Workload],
):
    pipeline, workload = shop
    write(pipeline)
    deliver_and_kill(pipeline, workload, FAILPOINTS)

    assert_delivered(pipeline)


def test_a_delivery_to_kafka_killed_in_a_transaction_of_several_windows_has_each_event_once_and_in_order(
    shop: tuple[Pipeline, Workload], kafka: SharedKafka
):
    pipeline, workload = shop
    write(
        pipeline,
        type="kafka",
        servers=[kafka.address.plain],
        topic=f"{kafka.prefix}{{table}}",
        progress_topic=f"progress.{kafka.prefix}",
        topics={"partitions": 1},
        batch=5,
    )
    deliver_and_kill(pipeline, workload, KAFKA_FAILPOINTS)
    pipeline.settle()
    expected, server = places_in_log(pipeline), kafka.address.plain
    pipeline.wait(lambda: len(committed(server, kafka.prefix)) >= len(expected), "every event in Kafka")

    found = dict[str, list[Place]]()
    for one in committed(server, kafka.prefix):
        found.setdefault(one.topic, []).append(place_of(one.id))
    assert sorted(place for places in found.values() for place in places) == expected, pipeline.output()
    assert all(places == sorted(places) for places in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_delivery_killed_at_random_moments_has_each_event_once_and_in_order(
    shop: tuple[Pipeline, Workload], seed: int
):
    pipeline, workload = shop
    random = Random(seed)
    write(pipeline, batch=random.choice((50, 200, 10_000)), rotate="4KiB")
    pipeline.reader()
    workload.start()
    for _ in range(4):
        sending = pipeline.start("cdc", "deliver")
        pipeline.wait_for_more(workload, random.randint(1, 40))
        sending.kill()
        assert sending.wait(10) == KILLED
    pipeline.start("cdc", "deliver")
    workload.stop()

    assert_delivered(pipeline)
    assert len(list((pipeline.folder / "out").glob("copy-*.jsonl"))) > 1


def test_of_two_processes_one_sends_and_the_other_continues_when_it_dies(shop: tuple[Pipeline, Workload]):
    pipeline, workload = shop
    write(pipeline)
    pipeline.reader()
    workload.start()
    both = [pipeline.start("cdc", "deliver") for _ in range(2)]
    for sending in both:
        pipeline.wait(lambda sending=sending: pipeline.reports(sending), "both processes")  # type: ignore[misc]
    pipeline.wait_for_more(workload, 20)
    both[0].kill()
    pipeline.wait_for_more(workload, 20)
    workload.stop()

    assert_delivered(pipeline)
    assert both[1].poll() is None


class Receiver:
    """A server that acknowledges each line, and breaks its first connections after a random number of them."""

    def __init__(self, random: Random) -> None:
        self._random, self._socket = random, socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.received: list[dict[str, Any]] = []
        self._connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Accept no connection any more."""
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            # closing writes what a killed client did not take
            with suppress(OSError), connection, connection.makefile("rwb") as lines:
                self._receive(lines)

    def _receive(self, lines: Any) -> None:
        self._connections += 1
        left = self._random.randint(20, 4_000) if self._connections <= BROKEN else -1
        try:
            while left and (line := lines.readline()).endswith(b"\n"):
                event = json.loads(line)
                self.received.append(event)
                lines.write(event["id"].encode() + b"\n")
                lines.flush()
                left -= 1
        except OSError:
            return


def test_a_connection_that_breaks_and_a_process_that_is_killed_lose_no_event(shop: tuple[Pipeline, Workload]):
    pipeline, workload = shop
    random = Random(3)
    receiver = Receiver(random)
    write(pipeline, type="tcp", host="127.0.0.1", port=receiver.port, acknowledge=True, batch=200)
    deliver_and_kill(pipeline, workload, ("delivery_sent:1", "delivery_acknowledged:2"))
    pipeline.settle()
    expected = places_in_log(pipeline)

    pipeline.wait(lambda: {place_of(one["id"]) for one in list(receiver.received)} >= set(expected), "every event")

    receiver.close()
    firsts = list(dict.fromkeys(place_of(one["id"]) for one in receiver.received))
    assert firsts == expected
    contents = {one["id"]: one["value"] for one in receiver.received}
    assert all(contents[one["id"]] == one["value"] for one in receiver.received)
