"""Formats of events: what a change looks like on the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Final

from cdc.config.deliveries import DeliverySettings, EventEncoding, EventFormat
from cdc.delivery.formats.cdc_json import CdcFormat
from cdc.delivery.formats.cloud_events import CloudEventsFormat
from cdc.delivery.formats.contract import Format
from cdc.delivery.formats.debezium import DebeziumFormat
from cdc.delivery.formats.event_rows import SourceNames
from cdc.delivery.formats.flat import FlatFormat
from cdc.errors import ClientMissing

_FORMATS: Final[Mapping[EventFormat, Callable[[DeliverySettings, SourceNames], Format]]] = {
    EventFormat.CDC: CdcFormat,
    EventFormat.CLOUDEVENTS: CloudEventsFormat,
    EventFormat.DEBEZIUM: DebeziumFormat,
    EventFormat.FLAT: FlatFormat,
}


def new_format(settings: DeliverySettings, names: SourceNames) -> Format:
    """Return the format of a delivery. Raises ClientMissing without the packages that its encoding requires."""
    if settings.encoding is EventEncoding.JSON:
        return _FORMATS[settings.format](settings, names)
    without_schemas = settings.debezium.model_copy(update={"schemas": False})
    inner = _FORMATS[settings.format](settings.model_copy(update={"debezium": without_schemas}), names)
    made: Format = _registry_module(settings).RegistryFormat(inner, settings.encoding, settings.schema_registry)
    return made


def check_registry(settings: DeliverySettings) -> None:
    """Raise an error if the schema registry of a delivery does not answer, or packages that it requires are missing."""
    if settings.encoding is not EventEncoding.JSON:
        _registry_module(settings).SchemaRegistry(settings.schema_registry).check()


def _registry_module(settings: DeliverySettings) -> ModuleType:
    try:
        return import_module("cdc.delivery.formats.registry_format")
    except ImportError as exc:
        raise ClientMissing(
            f"events in {settings.encoding.value} require the package extra 'registry': {exc.name} is missing"
        ) from exc
