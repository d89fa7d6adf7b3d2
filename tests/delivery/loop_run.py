"""A delivery loop over a log in a directory and a destination in memory, as the delivery process runs it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cdc.config.destinations import FileDelivery
from cdc.delivery.delivery_figures import DeliveryFigures
from cdc.delivery.delivery_loop import DeliveryLoop
from cdc.delivery.destinations.contract import DeliveryIdentity, Destination, Event
from cdc.delivery.event_source import EventSource
from cdc.delivery.progress import ProgressFile
from cdc.log.reader import LogReader
from cdc.metrics import Metrics
from tests.delivery.plain_format import PlainFormat

NAME = "copy"


def settings_of(**fields: Any) -> FileDelivery:
    """Settings of a delivery."""
    return FileDelivery.model_validate({"type": "file", "name": NAME, "path": "/nowhere", **fields})


class LoopRun:
    """One life of a loop, from `open` to `close`."""

    def __init__(
        self, root: Path, destination: Destination, encoding: PlainFormat | None = None, **fields: Any
    ) -> None:
        log, self.settings = LogReader(root), settings_of(**fields)
        self.root = root
        self.log, identity = log, DeliveryIdentity("shop", NAME, log.log_id)
        self.source = EventSource(log, self.settings, identity, encoding or PlainFormat())
        self.store = ProgressFile(root, log.log_id, NAME)
        self.figures = DeliveryFigures("shop", NAME, Metrics())
        self.destination = destination
        self.loop = DeliveryLoop(log, self.source, destination, self.store, self.figures)

    def __enter__(self) -> DeliveryLoop:
        self.loop.open(self.settings)
        return self.loop

    def __exit__(self, *_: object) -> None:
        self.loop.close()
        self.source.close()


def drain(loop: DeliveryLoop, most: int = 10_000) -> None:
    """Send until the log has nothing new."""
    while loop.step():
        most -= 1
        assert most, "the loop never ends"


def places_of(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Position and ordinal of each event."""
    return [(event.position, event.ordinal) for event in events]


def key_of(event: Event) -> list[str | None]:
    """Key of an event of PlainFormat."""
    found: list[str | None] = json.loads(event.key or b"[]")
    return found
