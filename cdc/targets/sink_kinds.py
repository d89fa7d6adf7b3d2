"""Kinds of sinks for readers: the only place in `cdc.targets` that knows them all."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, Final

from cdc.config.sink_definition import SinkDefinition
from cdc.targets.sink_reading import SinkReading

READINGS: Final[Mapping[str, str]] = {
    "delta": "cdc.targets.delta_reading:DeltaReading",
    "search": "cdc.targets.search_reading:SearchReading",
    "search_server": "cdc.targets.search_server.reading:SearchServerReading",
}
"""Kind of sink → module and class of its reading.

Modules are imported when they are needed, because each imports its client library: the HTTP client of a search server
alone takes a tenth of a second.
"""


def reading_of(sink: SinkDefinition) -> SinkReading[Any]:
    """Return how the targets of a sink are read."""
    reading: SinkReading[Any] = resolve_name(READINGS[sink.kind])()
    return reading
