"""Reports the views of an apply process: their state to the catalog, as that of a sink, and their metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from cdc import metrics
from cdc.errors import CdcError
from cdc.targets.published_record import Published, TableRecord, TargetState
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.views.view_computation import Work
from pipelines.views.view_engine import ViewFigures

PAUSED: Final = "paused"
"""Reported state of a view that somebody has paused."""
_STATES: Final[Mapping[str, str]] = {
    "live": TargetState.STREAMING,
    "waiting": TargetState.SNAPSHOTTING,
    "behind": TargetState.CATCHING_UP,
    "paused": PAUSED,
    "failed": TargetState.FAILED,
}


class ViewReport:
    """What one pipeline reports of its views."""

    def __init__(self, pipeline: str, figures: SinkFigures, process: metrics.Metrics) -> None:
        """figures: the reported state. process: the metrics of the process."""
        self._pipeline = pipeline
        self._figures = figures
        self._process = process

    def start(self, record: Published) -> None:
        """Report that the views are computed at a cut; until they are, the lag grows."""
        self._figures.start_batch(record.position)

    def computed(self, record: Published, views: Mapping[str, ViewFigures]) -> None:
        """Report the views at a cut."""
        tables = {
            number: TableRecord(
                number, topic, "", figures.position, None, _STATES[figures.state], figures.reason or None
            )
            for number, (topic, figures) in enumerate(views.items())
        }
        rows = {number: figures.changed_rows for number, figures in enumerate(views.values())}
        lag = max(0.0, time.time() - record.committed_at / 1e6) if record.committed_at and any(rows.values()) else None
        at_cut = Published(record.position, record.committed_at, tables)
        self._figures.record_published(at_cut, lag=lag, rows=rows)
        for topic, figures in views.items():
            self._add(topic, figures)
            self.slice_done(topic, figures.work)

    def slice_done(self, view: str, work: Work) -> None:
        """Report how far the computation of a view is; any thread may call it."""
        for metric, value in ((metrics.VIEW_KEYS_LEFT, work.keys_left), (metrics.VIEW_SECONDS_LEFT, work.seconds_left)):
            if value is None:
                self._process.remove(metric, self._pipeline, view)
            else:
                self._process.set(metric, value, self._pipeline, view)

    def failed(self, error: CdcError) -> None:
        """Report an error that is not that of one view."""
        self._figures.record_failure(error)

    def _add(self, view: str, figures: ViewFigures) -> None:
        labels, work = (self._pipeline, view), figures.work
        self._process.add(metrics.VIEW_CHANGES, figures.changed_rows, *labels)
        if work.mode:
            self._process.add(metrics.VIEW_INPUT_ROWS, work.input_rows, *labels)
            self._process.add(metrics.VIEW_AFFECTED_KEYS, work.affected_keys, *labels)
            self._process.add(metrics.VIEW_COMPUTATIONS, 1, *labels, work.mode)
            self._process.add(metrics.VIEW_SECONDS, work.seconds, *labels, work.mode)
