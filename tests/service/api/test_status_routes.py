"""Routes that show the pipeline: their answers, over a real catalog."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from cdc.catalog import Catalog, ProcessReport, SinkProgress, TableProgress
from cdc.errors import all_error_classes
from cdc.metrics import CADENCE, REWRITTEN_BYTES, SINK_IN_SPARK, Metrics
from cdc.service.api.app import create_app
from cdc.service.api.status_routes import event_stream
from tests.service.pipeline import NAME, definition
from tests.service.running import Clock, answering, client_of


def samples(client: httpx.Client) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_health_is_the_servers_own(client: httpx.Client, clock: Clock) -> None:
    clock.ahead = 100
    assert client.get("/healthz").json() == {"status": "ok"}


def test_readiness_ends_when_a_process_falls_silent(client: httpx.Client, clock: Clock) -> None:
    assert client.get("/readyz").status_code == 200
    clock.ahead = 100
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "down"})


def test_status_tells_rows_lags_and_positions(client: httpx.Client) -> None:
    status = client.get("/api/v1/status").json()
    assert status["state"] == "running"
    assert status["source"] | {"position": "0/16B3F2C8", "lag_seconds": 0.02, "rows": 12_480} == status["source"]
    assert {sink["name"] for sink in status["sinks"]} == {"lake", "find"}
    assert set(status["rates"]) == {"source", "sink:lake", "sink:find"}


def test_a_silent_process_is_never_shown_as_running(client: httpx.Client, clock: Clock) -> None:
    clock.ahead = 6
    states = {p["process"]: p["state"] for p in client.get("/api/v1/status").json()["processes"]}
    assert states["reader"] == states["apply"] == "stale"


def test_the_server_reports_itself(client: httpx.Client, catalog: Catalog) -> None:
    assert client.get("/healthz").status_code == 200
    assert "server" in {report.process for report in catalog.processes.ls(NAME)}


def test_pipelines_tables_and_sinks_are_listed(client: httpx.Client) -> None:
    assert client.get("/api/v1/pipelines").json() == [{"name": NAME, "state": "running"}]
    assert client.get(f"/api/v1/pipelines/{NAME}").json()["name"] == NAME
    assert {t["topic"] for t in client.get(f"/api/v1/pipelines/{NAME}/tables").json()} >= {"shop.orders"}
    assert len(client.get(f"/api/v1/pipelines/{NAME}/sinks").json()) == 2


def test_every_error_code_is_explained(client: httpx.Client) -> None:
    for error in all_error_classes():
        page = client.get(f"/api/v1/errors/{error.code}").json()
        assert page["code"] == error.code
        assert page["suggestion"]


def test_a_sink_that_a_huge_table_slows_down_says_so_and_is_no_problem(client: httpx.Client, catalog: Catalog) -> None:
    slowed = "a batch begins every 12.0 s, because each batch rewrites 1,536.0 MB of shop.<orders>"
    catalog.sinks.record(NAME, SinkProgress("lake", 7, None, 3.0, "running", slowed))
    figures = Metrics()
    figures.set(CADENCE, 12.0, NAME, "lake", "shop.<orders>")
    figures.add(REWRITTEN_BYTES, 1_536e6, NAME, "lake")
    catalog.processes.report(ProcessReport(NAME, "apply", 4712, "running", None, figures.to_json()))

    status = client.get("/api/v1/status").json()
    assert (status["state"], status["problems"]) == ("running", [])
    assert {sink["name"]: sink["reason"] for sink in status["sinks"]} == {"lake": slowed, "find": None}
    assert slowed.replace("<", "&lt;").replace(">", "&gt;") in client.get("/").text
    found = samples(client)
    assert found["cdc_sink_cadence_seconds", "lake", NAME, "shop.<orders>"] == 12.0
    assert found["cdc_sink_rewritten_bytes_total", "lake", NAME] == 1_536e6


def test_a_sink_whose_last_batch_spark_applied_says_so(client: httpx.Client, catalog: Catalog) -> None:
    figures = Metrics()
    figures.set(SINK_IN_SPARK, 1.0, NAME, "lake")
    figures.set(SINK_IN_SPARK, 0.0, NAME, "find")
    catalog.processes.report(ProcessReport(NAME, "apply", 4712, "running", None, figures.to_json()))

    engines = {sink["name"]: sink["engine"] for sink in client.get("/api/v1/status").json()["sinks"]}
    assert engines == {"lake": "spark", "find": "here"}
    assert client.get("/").text.count("last batch in Spark") == 1


def test_hostile_names_stay_text_on_the_page_and_in_the_metrics(client: httpx.Client, catalog: Catalog) -> None:
    name = 'shop.<script>alert("1")</script>\n\'"><img src=x onerror=alert(2)>'
    catalog.tables.record(NAME, [TableProgress("lake", name, "failed", name, 1, 1, 1)])
    page = client.get("/").text
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert any(name in labels for labels in samples(client))


def test_the_secret_part_of_the_source_is_nowhere(catalog: Catalog, tmp_path: Path) -> None:
    secret = definition(tmp_path, "postgresql://reader:canary@db.internal/shop")
    with answering(create_app(catalog, secret, "log")) as url, client_of(url) as client:
        for path in ("/", "/api/v1/status", "/api/v1/pipelines", "/metrics"):
            text = client.get(path).text
            assert "canary" not in text
        assert "db.internal/shop" in client.get("/").text


def test_events_come_one_per_sample_and_end_with_the_server(app: Starlette) -> None:
    sampler = app.state.sampler

    async def two() -> list[dict[str, Any]]:
        found = []
        async for event in event_stream(sampler, "sections", sampler.sections):
            found.append(json.loads(event.partition("data: ")[2]))
            if len(found) == 1:
                sampler.sample()
            else:
                sampler.is_stopping = True
        return found

    first, second = asyncio.run(two())
    assert set(first["sections"]) == set(second["sections"]) >= {"headline", "flow", "tables"}
