"""Encoding of events: CPU per row of each format and encoding, from the log to the bytes of an event."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

from cdc.config.destinations import KafkaDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.event_source import EventSource
from cdc.delivery.formats import new_format
from cdc.delivery.formats.event_rows import SourceNames
from cdc.delivery.progress import Progress
from cdc.log.reader import LogReader
from tests.benchmarks.figures import Figure
from tests.benchmarks.search_input import write_log
from tests.fixtures.schema_registry import running_registry

FORMATS: Final = ("debezium", "flat", "cdc")
ENCODINGS: Final = ("json", "avro", "protobuf")
WARM_ROWS: Final = 1_000


def figures() -> dict[str, Figure]:
    """Return the figures without values."""
    return {f"encode_us.{name}.{encoding}": Figure("µs") for name, encoding in product(FORMATS, ENCODINGS)}


def measure(rows: int) -> dict[str, float]:
    """Return the microseconds of CPU that a row of six columns takes."""
    values = {}
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        warm, log = write_log(Path(name, "warm"), WARM_ROWS), write_log(Path(name, "full"), rows)
        for event_format, encoding in product(FORMATS, ENCODINGS):
            with running_registry() as (url, _):  # a subject of a registry keeps its kind of schema
                settings = _settings(event_format, encoding, url)
                _cpu_seconds(warm, settings, WARM_ROWS)  # it imports modules
                values[f"encode_us.{event_format}.{encoding}"] = _cpu_seconds(log, settings, rows) / rows * 1e6
    return values


def _settings(event_format: str, encoding: str, registry: str) -> KafkaDelivery:
    keys = {
        "type": "kafka",
        "name": "events",
        "servers": ["localhost:9092"],
        "format": event_format,
        "encoding": encoding,
    }
    access = {} if encoding == "json" else {"schema_registry": {"url": registry}}
    return KafkaDelivery.model_validate({**keys, **access})


def _cpu_seconds(root: Path, settings: KafkaDelivery, rows: int) -> float:
    """Read and encode a log; return the CPU seconds of this process. Raises RuntimeError if events are missing."""
    log = LogReader(root)
    names = SourceNames("bench", log.identity.database, "0", log.log_id)
    identity = DeliveryIdentity("bench", settings.name, log.log_id)
    began = time.process_time()
    source = EventSource(log, settings, identity, new_format(settings, names))
    progress, events = Progress(log_id=log.log_id), 0
    while (window := source.next(progress)) is not None:
        events += sum(len(part.encoded.events) for part in window.parts)
        progress = replace(progress, position=window.upto, bootstrap=window.window.bootstrap)
    source.close()
    if events != rows:
        raise RuntimeError(f"{events:,} events instead of {rows:,}")
    return time.process_time() - began
