"""Watch: what the demo sees of the pipeline, through the catalog and the log, as any other reader of them would."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import pyarrow.compute as pc

from cdc.catalog import Catalog
from cdc.change import Operation
from cdc.demo.ground import Ground
from cdc.errors import LogError
from cdc.log.read import LogReader, read_file
from cdc.metrics import SLOT_RETAINED, SOURCE_LAG_SECONDS
from cdc.position import Position

PIPELINE: Final = "shop"
LAKE: Final = "lake"
FIND: Final = "find"
SETTLED: Final = 5.0
"""Seconds of lag under which a sink has caught up with the first copy and its batches tell freshness."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The pipeline at one moment."""

    durable: Position | None
    sinks: dict[str, Position]
    """Published position by sink; absent before the first publication."""
    lag: dict[str, float]
    """Seconds by sink."""
    source_lag: float | None
    slot_retained: float | None
    """Bytes."""
    versions: dict[tuple[str, str], tuple[int | None, int]]
    """(sink, topic) → target version, rows."""


@dataclass(slots=True)
class Freshness:
    """Lag of each published batch by sink; the first copy, which is as old as the database, is left out."""

    _samples: dict[str, list[float]] = field(default_factory=dict)
    _seen: dict[str, Position] = field(default_factory=dict)

    def add(self, sight: Sight) -> None:
        """Take what is new in a sight."""
        for sink, position in sight.sinks.items():
            if position == self._seen.get(sink):
                continue
            self._seen[sink] = position
            samples = self._samples.setdefault(sink, [])
            if samples or sight.lag[sink] < SETTLED:
                samples.append(sight.lag[sink])

    def p50_ms(self, sink: str) -> float | None:
        """Median from commit at the source to visible in the sink, milliseconds; None without a batch."""
        samples = self._samples.get(sink)
        return round(median(samples) * 1000, 1) if samples else None


class Watch:
    """Looks at catalog and log; each look costs a few milliseconds."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._catalog = Catalog.open(ground.catalog_url)
        self._log: LogReader | None = None

    def close(self) -> None:
        """Let go of the catalog."""
        self._catalog.close()

    @property
    def log(self) -> LogReader | None:
        """The log, once it exists."""
        if self._log is None:
            try:
                self._log = LogReader(str(self._ground.log))
            except LogError:
                return None
        self._log.refresh()
        return self._log

    def look(self) -> Sight:
        """The pipeline as it is now."""
        log = self.log
        sinks = [sink for sink in self._catalog.sinks.ls(PIPELINE) if sink.position > 0]
        tables = list(self._catalog.tables.ls(PIPELINE))
        figures = self._figures()
        return Sight(
            durable=log.durable if log is not None else None,
            sinks={sink.sink: Position(sink.position) for sink in sinks},
            lag={sink.sink: sink.lag_seconds for sink in sinks},
            source_lag=figures.get(SOURCE_LAG_SECONDS.name),
            slot_retained=figures.get(SLOT_RETAINED.name),
            versions={(table.sink, table.topic): (table.version, table.rows) for table in tables if table.sink},
        )

    def copied(self, upto: Position) -> list[tuple[str, int]]:
        """(topic, rows of its first copy) up to a position, by topic."""
        log = self.log
        files = log.files(Position(0), upto) if log is not None else []
        counts: Counter[str] = Counter()
        for file in files:
            rows = read_file(file, Position(0), upto, ["topic", "op"])
            topics = rows.filter(pc.equal(rows["op"], Operation.READ.value))["topic"]
            counts.update({entry["values"]: entry["counts"] for entry in pc.value_counts(topics).to_pylist()})
        return sorted(counts.items())

    def _figures(self) -> dict[str, float]:
        """What reader and server report, by metric; of one with several label values any will do for a line."""
        found: dict[str, float] = {}
        for report in self._catalog.processes.ls(PIPELINE):
            if report.process in {"reader", "server"}:
                figures: Any = report.figures
                found |= {name: float(value) for name, _, value in figures}
        return found
