"""Reports of views: state and lag as of a sink, and metrics of each view."""

from __future__ import annotations

import time

import pytest

from cdc import metrics
from cdc.errors import SinkUnavailable
from cdc.targets.published_record import Published
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.views.view_computation import Work
from pipelines.views.view_engine import ViewFigures
from pipelines.views.view_report import PAUSED, ViewReport

VIEWS = {
    "shop.v_a": ViewFigures("live", "", 20, 3, Work("whole", input_rows=5, affected_keys=4, seconds=1.5)),
    "shop.v_b": ViewFigures("paused", "somebody", 10),
}


def test_views_are_reported_with_state_lag_and_metrics() -> None:
    process = metrics.Metrics()
    figures = SinkFigures("shop", "views", process, clock=lambda: time.time() + 50)
    report = ViewReport("shop", figures, process)
    record = Published(20, int((time.time() - 5) * 1e6), {})

    report.start(record)
    report.failed(SinkUnavailable("gone"))
    failed = figures.to_sink()
    assert failed is not None
    assert failed.state == "failed"
    report.slice_done("shop.v_a", Work(keys_left=9, seconds_left=1.5))
    left = {one.metric.name: one.value for one in process if one.labels == ("shop", "shop.v_a")}
    assert left == {metrics.VIEW_KEYS_LEFT.name: 9, metrics.VIEW_SECONDS_LEFT.name: 1.5}
    report.slice_done("shop.v_a", Work(keys_left=None, seconds_left=None))
    assert [one for one in process if one.labels == ("shop", "shop.v_a")] == []
    report.computed(record, VIEWS)
    report.computed(record, VIEWS)

    sink, tables = figures.to_sink(), figures.to_tables()
    assert sink is not None
    assert (sink.position, sink.state) == (20, "running")
    assert sink.lag_seconds == pytest.approx(5, abs=2)
    assert [(one.topic, one.state, one.reason, one.position, one.rows) for one in tables] == [
        ("shop.v_a", "streaming", None, 20, 6),
        ("shop.v_b", PAUSED, "somebody", 10, 0),
    ]
    values = {(one.metric.name, *one.labels): one.value for one in process}
    assert values[metrics.VIEW_CHANGES.name, "shop", "shop.v_a"] == 6
    assert values[metrics.VIEW_INPUT_ROWS.name, "shop", "shop.v_a"] == 10
    assert values[metrics.VIEW_AFFECTED_KEYS.name, "shop", "shop.v_a"] == 8
    assert values[metrics.VIEW_COMPUTATIONS.name, "shop", "shop.v_a", "whole"] == 2
    assert values[metrics.VIEW_SECONDS.name, "shop", "shop.v_a", "whole"] == 3.0
    assert (metrics.VIEW_COMPUTATIONS.name, "shop", "shop.v_b", "") not in values
