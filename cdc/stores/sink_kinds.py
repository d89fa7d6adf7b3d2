"""Kinds of sinks for readers: the only place in `cdc.stores` that knows them all."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, Final

from cdc.config.sink_definition import SinkDefinition
from cdc.stores.sink_reading import SinkReading

READINGS: Final[Mapping[str, str]] = {
    "delta": "cdc.stores.delta_reading:DeltaReading",
    "search": "cdc.stores.search_reading:SearchReading",
    "search_server": "cdc.stores.search_server.reading:SearchServerReading",
}
"""Kind of sink → module and class of its reading.

Modules are imported when they are needed, because each imports its client library: the HTTP client of a search server
alone takes a tenth of a second.
"""


def reading_of(sink: SinkDefinition) -> SinkReading[Any]:
    """Return how the targets of a sink are read."""
    reading: SinkReading[Any] = resolve_name(READINGS[sink.kind])()
    return reading
