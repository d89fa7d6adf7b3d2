"""Puts the parts of one delivery together: source, format, destination, progress and loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import NamedTuple

from cdc.config import Definition
from cdc.config.destinations import Delivery
from cdc.delivery.delivery_figures import DeliveryFigures
from cdc.delivery.delivery_loop import DeliveryLoop
from cdc.delivery.destinations import new_destination, own_format
from cdc.delivery.destinations.contract import DeliveryIdentity, ServesHistory
from cdc.delivery.event_source import EventSource
from cdc.delivery.formats import new_format
from cdc.delivery.formats.contract import Format
from cdc.delivery.formats.event_rows import SourceNames
from cdc.delivery.missed_events import LoggedHistory
from cdc.delivery.progress import ProgressFile, delivery_uuid
from cdc.log.consumer_registration import ConsumerRegistration
from cdc.log.reader import LogReader


class OpenedDelivery(NamedTuple):
    """The loop of a delivery, connected to its destination, and its registration as a consumer of the log."""

    loop: DeliveryLoop
    registration: ConsumerRegistration


@contextmanager
def opened_delivery(
    definition: Definition, settings: Delivery, log_reader: LogReader, figures: DeliveryFigures
) -> Iterator[OpenedDelivery]:
    """Yield a delivery that is connected to its destination; it is closed after the block."""
    identity = DeliveryIdentity(definition.name, settings.name, log_reader.log_id)
    names = SourceNames(definition.name, log_reader.identity.database, version("cdc"), log_reader.log_id)
    source = EventSource(log_reader, settings, identity, _format(settings, names))
    root = definition.log_of(settings)
    store = ProgressFile(root, log_reader.log_id, settings.name)
    destination = new_destination(settings, identity)
    loop = DeliveryLoop(log_reader, source, destination, store, figures)
    history = None
    if isinstance(destination, ServesHistory):
        # a log reader and a source of its own: receivers ask while the loop sends
        log = LogReader(root)
        own_source = EventSource(log, settings, identity, _format(settings, names))
        history = LoggedHistory(log, own_source, lambda: loop.progress.parked)
        destination.serve_history(history)
    try:
        loop.open(settings)
        uuid = delivery_uuid(log_reader.log_id, settings.name)
        yield OpenedDelivery(loop, ConsumerRegistration(root, uuid, settings.name))
    finally:
        loop.close()
        if history is not None:
            history.close()
        source.close()


def _format(settings: Delivery, names: SourceNames) -> Format:
    """Return the format of a delivery; metrics have one of their own."""
    own: Format | None = own_format(settings)
    return new_format(settings, names) if own is None else own
