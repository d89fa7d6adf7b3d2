"""Formats of events: what a change looks like on the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from cdc.config.deliveries import DeliverySettings, EventFormat
from cdc.delivery.formats.cdc_json import CdcFormat
from cdc.delivery.formats.cloud_events import CloudEventsFormat
from cdc.delivery.formats.contract import Format
from cdc.delivery.formats.debezium import DebeziumFormat
from cdc.delivery.formats.event_rows import SourceNames
from cdc.delivery.formats.flat import FlatFormat

_FORMATS: Final[Mapping[EventFormat, Callable[[DeliverySettings, SourceNames], Format]]] = {
    EventFormat.CDC: CdcFormat,
    EventFormat.CLOUDEVENTS: CloudEventsFormat,
    EventFormat.DEBEZIUM: DebeziumFormat,
    EventFormat.FLAT: FlatFormat,
}


def new_format(settings: DeliverySettings, names: SourceNames) -> Format:
    """Return the format of a delivery."""
    return _FORMATS[settings.format](settings, names)
