"""Prometheus metrics of the server: reported by processes, and corrected for silent processes."""

from __future__ import annotations

from importlib.metadata import version

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cdc.catalog import Catalog, ProcessReport
from cdc.metrics import CHANGES, LOG_BLOCKED, SINK_LATENCY, SLOT_RETAINED, Metrics
from tests.service.pipeline import NAME
from tests.service.running import Clock


def samples(client: httpx.Client) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_metrics_are_prometheus_text_and_agree_with_the_status(client: httpx.Client) -> None:
    found = samples(client)
    assert found["cdc_changes_total", NAME] == 12_480
    assert found["cdc_sink_lag_seconds", "lake", NAME] == pytest.approx(0.61)
    assert found["cdc_health", "reader", NAME] == 1
    assert found["cdc_table_state", "lake", NAME, "shop.orders", "streaming"] == 1


def test_histograms_of_the_processes_reach_the_metrics_as_histograms(client: httpx.Client, catalog: Catalog) -> None:
    figures = Metrics()
    for seconds in (0.02, 0.3, 7.0):
        figures.observe(SINK_LATENCY, seconds, NAME, "lake")
    catalog.processes.report(ProcessReport(NAME, "apply", 4712, "running", None, figures.to_json()))
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    found = families["cdc_sink_latency_seconds"]
    assert found.type == "histogram"
    counts = {sample.labels.get("le", sample.name): sample.value for sample in found.samples}
    assert (counts["0.05"], counts["0.5"], counts["10.0"], counts["+Inf"]) == (1, 2, 3, 3)
    assert counts["cdc_sink_latency_seconds_count"] == 3
    assert counts["cdc_sink_latency_seconds_sum"] == pytest.approx(7.32)


def test_the_build_and_the_age_of_each_report_are_in_the_metrics(client: httpx.Client, clock: Clock) -> None:
    clock.ahead = 100
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    (build,) = families["cdc_build_info"].samples
    assert (build.value, build.labels["pipeline"], build.labels["version"]) == (1, NAME, version("cdc"))
    ages = {sample.labels["process"]: sample.value for sample in families["cdc_report_age_seconds"].samples}
    assert ages["reader"] == pytest.approx(100, abs=10)


def test_what_a_process_did_when_it_last_reported_is_not_shown_once_it_is_silent(
    client: httpx.Client, catalog: Catalog, clock: Clock
) -> None:
    figures = Metrics()
    figures.set(LOG_BLOCKED, 1.0, NAME)
    figures.add(CHANGES, 7.0, NAME)
    catalog.processes.report(ProcessReport(NAME, "reader", 4711, "running", None, figures.to_json()))
    assert samples(client)["cdc_log_blocked", NAME] == 1
    clock.ahead = 100
    found = samples(client)
    assert ("cdc_log_blocked", NAME) not in found
    assert found["cdc_changes_total", NAME] == 7


def test_what_a_reader_of_an_earlier_version_reports_of_the_slot_is_not_passed_on(
    client: httpx.Client, catalog: Catalog
) -> None:
    figures = Metrics()
    figures.set(SLOT_RETAINED, 200.0, NAME)
    catalog.processes.report(ProcessReport(NAME, "reader", 4711, "running", None, figures.to_json()))
    assert "cdc_slot_retained_bytes" not in client.get("/metrics").text


def test_metrics_of_a_silent_pipeline_grow_and_its_health_is_zero(client: httpx.Client, clock: Clock) -> None:
    clock.ahead = 100
    found = samples(client)
    assert found["cdc_health", "reader", NAME] == 0
    assert found["cdc_source_lag_seconds", NAME] == pytest.approx(100, abs=10)
