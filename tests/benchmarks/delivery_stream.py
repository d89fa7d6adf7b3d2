"""Delivery from end to end: log → Kafka in a process of its own, and commit in Postgres → consumer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import quantiles
from threading import Event, Thread
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from confluent_kafka import Consumer

from cdc.catalog import Catalog
from cdc.catalog.delivery_requests import DELIVERY_PAUSES
from cdc.config import load_definition
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.destinations.contract import Event as DeliveredEvent
from cdc.delivery.event_source import EventSource
from cdc.delivery.formats import new_format
from cdc.delivery.formats.event_rows import SourceNames
from cdc.delivery.progress import Progress
from cdc.log.reader import LogReader, read_file
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.slot import drop_slot
from tests.benchmarks import workloads
from tests.benchmarks.apply_input import Changes
from tests.benchmarks.peers import SOURCE_SETTINGS, Reader, ReaderPlace, prepare, running_module, under_load, until

DELIVERY: Final = "events"
RATE: Final = 125.0
"""Transactions per second of four changes each, over four tables."""
UNLIMITED: Final = 1e9
"""A rate for which no transaction waits."""
ACCOUNTS: Final = 10_000
SENDER: Final = """
from cdc.import_guard import refuse_pandas
refuse_pandas()
from pathlib import Path
import sys
from tests.benchmarks.delivery_sender import main
main(Path(sys.argv[1]))
"""
REACHED: Final = 0.95
"""Share of the rate that has to be seen."""


def sent_log(folder: Path, address: str, changes: int) -> dict[str, float]:
    """Return the events per second of a process that sends a log of this many changes to Kafka, and its memory."""
    folder.mkdir()
    random = np.random.default_rng(7)
    Changes.random(random, changes // 10, changes - changes // 10).log(folder)
    definition = folder / "definition.yaml"
    definition.write_text(
        f"name: bench_{folder.name}\nsource: {{dsn: 'postgresql://nobody@localhost/none'}}\n"
        f"tables: [{{match: 'shop.*'}}]\nlog: {{path: {folder}/log}}\n{_deliveries(address)}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", SENDER, str(definition)],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def events_of(folder: Path) -> list[DeliveredEvent]:
    """Return the events of the log that `sent_log` made, as the delivery encodes them."""
    definition = load_definition(folder / "definition.yaml")
    settings, log = definition.deliveries[0], LogReader(definition.log.root)
    identity = DeliveryIdentity(definition.name, settings.name, log.log_id)
    names = SourceNames(definition.name, log.identity.database, "0", log.log_id)
    source = EventSource(log, settings, identity, new_format(settings, names))
    progress, found = Progress(log_id=log.log_id), list[DeliveredEvent]()
    while (window := source.next(progress)) is not None:
        found += [event for part in window.parts for event in part.encoded.events]
        progress = replace(progress, position=window.upto, bootstrap=window.window.bootstrap)
    source.close()
    return found


def measure_stream(folder: Path, address: str, load: tuple[float, float, float]) -> dict[str, float]:
    """Return the latencies of all changes that were committed while it was measured, and how fast a delivery that was
    away catches up. load: seconds before the measurement, seconds that are measured, and seconds of load that the
    delivery has missed when it continues.
    """
    folder.mkdir()
    work = workloads.tpcb(0, ACCOUNTS)
    with EmbeddedPostgres(folder / "postgres", version=18, settings=SOURCE_SETTINGS, tcp=True) as server:
        prepare(server.dsn(), *work.setup)
        place = ReaderPlace("events", folder, server.dsn(), f"{work.schema}.*", "events_pub", _deliveries(address))
        with Reader(place) as reader, _delivering(place) as process, _SeenEvents(address) as seen:
            until(lambda: reader.runs() and process.poll() is None and seen.count >= ACCOUNTS, 300)
            with under_load(server.dsn(), work.schema, RATE):
                time.sleep(load[0])
                began = time.time()
                time.sleep(load[1])
                ended = time.time()
                lags = seen.lags(began, ended)
            caught_up = _catch_up(place, seen, work, load[2])
        with connect(server.dsn()) as conn:
            drop_slot(conn, place.slot)
    cuts = quantiles(lags, n=100)
    return {
        "kafka_p50_ms": cuts[49] * 1e3,
        "kafka_p99_ms": cuts[98] * 1e3,
        "stream_changes_per_second": len(lags) / (ended - began),
        **caught_up,
    }


def _catch_up(place: ReaderPlace, seen: _SeenEvents, work: workloads.Workload, seconds: float) -> dict[str, float]:
    """Let a paused delivery miss the load of so many seconds, then let it go on under load.

    The missed transactions are committed as fast as the server can. `catch_up_ratio` is the events per second until all
    missed ones are read, divided by the load.
    """
    definition = load_definition(place.write())
    with Catalog.open(definition.catalog.url) as catalog:
        _wait_until_all_is_read(seen)
        DELIVERY_PAUSES.pause(catalog, definition.name, DELIVERY, "benchmark")
        until(lambda: "paused" in {sink.state for sink in catalog.sinks.ls(definition.name)}, 60)
        before, log = seen.count, LogReader(place.log)
        sent = log.durable or Position(0)
        prepare(place.dsn, f"CALL {work.schema}.paced({round(RATE * seconds)}, {UNLIMITED})")
        waiting = round(4 * RATE * seconds)
        until(lambda: rows_behind(LogReader(place.log), sent) >= waiting, 600, pause=1.0)
        with under_load(place.dsn, work.schema, RATE):
            began = time.monotonic()
            DELIVERY_PAUSES.resume(catalog, definition.name, DELIVERY, "benchmark")
            # the consumer reads one partition before the other, so the last position alone proves nothing
            until(lambda: seen.count >= before + waiting, 1_800, pause=0.005)
            # with the time in which the process looks for the request
            took, events = time.monotonic() - began, seen.count - before
    return {"catch_up_ratio": events / took / (4 * RATE), "catch_up_seconds": took, "catch_up_events": events}


def _wait_until_all_is_read(seen: _SeenEvents) -> None:
    count = -1
    while seen.count != count:
        count = seen.count
        time.sleep(1.0)


def rows_behind(log: LogReader, after: Position) -> int:
    """Return the number of the log's rows behind a position."""
    upto = log.durable or Position(0)
    return sum(read_file(file, after, upto, ["position"]).num_rows for file in log.files(after, upto))


def _deliveries(address: str) -> str:
    topics = {"partitions": 4}
    own = {"type": "kafka", "name": DELIVERY, "servers": [address], "topic": "bench.{table}", "topics": topics}
    return f"deliveries: {json.dumps([own])}\nservice: {{port: 0}}"


@contextmanager
def _delivering(place: ReaderPlace) -> Iterator[subprocess.Popen[bytes]]:
    with running_module(place.folder / "deliver.out", "cdc", "deliver", "-c", str(place.write())) as process:
        yield process


class _SeenEvents:
    """Events that a consumer has read, with the time of each; a thread reads inside the block."""

    def __init__(self, address: str) -> None:
        settings: dict[str, Any] = {
            "bootstrap.servers": address,
            "group.id": "benchmark",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "topic.metadata.refresh.interval.ms": 500,
            "fetch.wait.max.ms": 50,
        }
        self._consumer = Consumer(settings)
        self._consumer.subscribe(["^bench\\..*"])
        self._stop = Event()
        self._thread = Thread(target=self._read, daemon=True)
        self._seen: list[tuple[float, float]] = []
        """(commit time, time of reading) of each event, in seconds since 1970."""
        self.count = self.position = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._consumer.close()

    def lags(self, began: float, ended: float) -> list[float]:
        """Return the seconds from commit to consumer of each change that was committed in between."""
        return [seen - committed for committed, seen in list(self._seen) if began <= committed <= ended]

    def _read(self) -> None:

        while not self._stop.is_set():
            messages = self._consumer.consume(1_000, timeout=0.02)
            now = time.time()
            for message in messages:
                if message.error() or message.value() is None:
                    continue
                content = json.loads(message.value())
                self._seen.append((datetime.fromisoformat(content["committed_at"]).timestamp(), now))
                self.position = max(self.position, int(Position.parse(content["position"])))
                self.count += 1
