"""What commands and API show of each delivery: its definition, and the progress that the catalog has."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cdc.catalog import REPORT_MAX_AGE, Catalog, SinkProgress
from cdc.catalog.delivery_requests import DELIVERY_PAUSES
from cdc.config import Definition
from cdc.delivery.destinations import promise_of
from cdc.errors import UnknownName
from cdc.position import Position


@dataclass(frozen=True, slots=True)
class DeliverySummary:
    """One delivery of a pipeline."""

    name: str
    type: str
    """Type of the destination."""
    promise: str
    """How often a consumer sees each event: exactly once | at least once | at most once."""
    format: str
    topic: str
    state: str
    """not started | running | paused | failed | stopped: the process that sends it has ended or does not report."""
    reason: str | None
    """Why the delivery does not continue."""
    position: str | None
    """Position up to which every event is acknowledged."""
    lag_seconds: float | None
    paused: bool
    """True if somebody has paused the delivery."""


def summaries(definition: Definition, catalog: Catalog, now: datetime | None = None) -> list[DeliverySummary]:
    """Return every delivery of a definition. now: default the present time."""
    progress = {one.sink: one for one in catalog.sinks.ls(definition.name)}
    paused = DELIVERY_PAUSES.paused(catalog, definition.name)
    is_running = _is_running(catalog, definition.name, now or datetime.now(UTC))
    return [
        DeliverySummary(
            name=one.name,
            type=one.type,
            promise=promise_of(one).value,
            format=one.format.value,
            topic=one.topic,
            paused=one.name in paused,
            **_progress_fields(progress.get(one.name), is_running=is_running),
        )
        for one in definition.deliveries
    ]


def check_name(definition: Definition, name: str) -> None:
    """Raise UnknownName if the definition has no delivery with this name."""
    defined = [delivery.name for delivery in definition.deliveries]
    if name not in defined:
        names = ", ".join(map(repr, defined)) or "none"
        raise UnknownName(
            f"pipeline {definition.name!r} has no delivery {name!r}", remedy=f"this definition has: {names}"
        )


def _is_running(catalog: Catalog, pipeline: str, now: datetime) -> bool:
    """Return whether a process that sends deliveries has reported lately."""
    report = next((one for one in catalog.processes.ls(pipeline) if one.process == "deliver"), None)
    return report is not None and report.state == "running" and report.age(now) <= REPORT_MAX_AGE


def _progress_fields(progress: SinkProgress | None, *, is_running: bool) -> dict[str, Any]:
    if progress is None:
        return {"state": "not started", "reason": None, "position": None, "lag_seconds": None}
    return {
        "state": progress.state if is_running or progress.state == "failed" else "stopped",
        "reason": progress.reason,
        "position": str(Position(progress.position)),
        "lag_seconds": round(progress.lag_seconds, 3),
    }
