"""Metrics: declared once, moved with the labels they were declared with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Thread

import pytest

from cdc.metrics import (
    APPLY_DURATION,
    CHANGES,
    LOG_POSITION,
    METRICS_BY_NAME,
    SINK_LAG_SECONDS,
    SNAPSHOT_ROWS,
    Kind,
    Metric,
    Metrics,
)

ALERTS = Path(__file__).resolve().parent.parent / "deploy" / "prometheus" / "cdc.rules.yml"
every_metric = pytest.mark.parametrize("metric", METRICS_BY_NAME.values(), ids=lambda m: m.name)


@every_metric
def test_a_metric_is_named_as_prometheus_asks(metric: Metric) -> None:
    assert re.fullmatch(r"cdc_[a-z_]+", metric.name)
    assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total")
    assert metric.labels[0] == "pipeline"
    assert metric.help


def test_shipped_alerts_use_declared_metrics() -> None:
    expressions = "\n".join(line for line in ALERTS.read_text(encoding="utf-8").splitlines() if "expr:" in line)
    used = set(re.findall(r"\bcdc_[a-z_]+\b", expressions))

    assert used
    assert used <= set(METRICS_BY_NAME)


def test_counters_add_and_gauges_replace() -> None:
    figures = Metrics()
    for value in (1.0, 2.0):
        figures.add(CHANGES, value, "shop")
        figures.set(SINK_LAG_SECONDS, value, "shop", "lake")

    assert {(s.metric.name, s.value) for s in figures} == {(CHANGES.name, 3.0), (SINK_LAG_SECONDS.name, 2.0)}


def test_a_histogram_counts_each_value_in_every_bucket_that_is_not_below_it() -> None:
    figures = Metrics()
    for seconds in (0.005, 0.02, 100.0):
        figures.observe(APPLY_DURATION, seconds, "shop", "lake")
    series = {(name, *labels): value for name, labels, value in json.loads(json.dumps(figures.to_json()))}
    buckets = {bound: value for (name, *_, bound), value in series.items() if name.endswith("_bucket")}
    assert (buckets["0.005"], buckets["0.01"], buckets["0.025"], buckets["60.0"], buckets["+Inf"]) == (1, 1, 2, 2, 3)
    assert series["cdc_apply_duration_seconds_sum", "shop", "lake"] == pytest.approx(100.025)


def test_buckets_of_a_histogram_ascend() -> None:
    bounds = [metric.bounds for metric in METRICS_BY_NAME.values() if metric.kind is Kind.HISTOGRAM]
    assert bounds
    assert all(found == tuple(sorted(set(found))) for found in bounds)


def test_wrong_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="wrong labels for 'cdc_sink_lag_seconds'"):
        Metrics().set(SINK_LAG_SECONDS, 1.0, "shop")


def test_figures_survive_json() -> None:
    figures = Metrics()
    figures.set(SINK_LAG_SECONDS, 0.5, "shop", "lake")

    assert json.loads(json.dumps(figures.to_json())) == [["cdc_sink_lag_seconds", ["shop", "lake"], 0.5]]


def test_no_addition_is_lost_between_threads() -> None:
    figures = Metrics()

    def add() -> None:
        for _ in range(500):
            figures.add(CHANGES, 1.0, "shop")

    threads = [Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert next(iter(figures)).value == 2000.0


def test_counters_continue_from_those_of_an_earlier_process_and_gauges_do_not() -> None:
    earlier, now = Metrics(), Metrics()
    earlier.add(CHANGES, 40, "shop")
    earlier.add(SNAPSHOT_ROWS, 7, "shop", "shop.orders")
    earlier.set(LOG_POSITION, 9, "shop")
    now.add(CHANGES, 2, "shop")
    now.continue_from(earlier.to_json())
    assert now.value(CHANGES, "shop") == 42
    assert now.value(LOG_POSITION, "shop") is None
    assert now.value(SNAPSHOT_ROWS, "shop", "shop.orders") is None
