"""Proof over the API: through when tables are verified, as status and metrics tell it too, and a comparison now."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cdc.catalog import Catalog
from cdc.catalog.commands import VERIFY
from cdc.service.api.app import create_app
from cdc.service.background_jobs import verify_status
from tests.catalog.test_verified_ranges import range_of
from tests.fixtures.waiting import until
from tests.pipelines.shop_pipeline import make_shop
from tests.service.pipeline import NAME, definition, fill, new_catalog
from tests.service.running import answering, client_of

VERIFY_PATH = f"/api/v1/pipelines/{NAME}/verify"
AT = datetime(2026, 11, 20, 12, tzinfo=UTC)
ASKED = {"tables": [], "sinks": [], "mode": "rows", "against": "source", "repair": False}


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with new_catalog(tmp_path) as opened:
        fill(opened)
        opened.verified.record(NAME, range_of(topic="shop.orders", verified_at=AT))
        later = AT + timedelta(hours=1)
        opened.verified.record(NAME, range_of(topic="shop.orders", began=later, verified_at=later, mismatched=3))
        opened.verified.record(NAME, range_of(topic="shop.items", ended="5", verified_at=AT))
        yield opened


@pytest.fixture
def client(catalog: Catalog, tmp_path: Path) -> Iterator[httpx.Client]:
    with answering(create_app(catalog, definition(tmp_path), "log")) as url, client_of(url) as opened:
        yield opened


def test_what_was_compared_is_told_alike_by_verify_status_problems_and_metrics(client: httpx.Client) -> None:
    proof = client.get(VERIFY_PATH).json()
    items, orders = proof["tables"]
    assert proof["last"] is None
    assert (items["verified_through"], items["ranges"], items["ended"]) == (None, 1, False)
    assert (orders["verified_through"], orders["mismatched"]) == ("2026-11-20T13:00:00+00:00", 3)
    assert orders["equal_at"] == "2026-11-20T12:00:00+00:00"
    status = client.get("/api/v1/status").json()
    assert status["verified"] == proof["tables"]
    (problem,) = [one for one in status["problems"] if one["code"] == "CDC-6001"]
    assert problem["subject"] == "table shop.orders in lake"
    samples = {
        (sample.name, sample.labels["table"]): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if "verif" in sample.name and "table" in sample.labels
    }
    assert samples == {
        ("cdc_verify_last_success_timestamp_seconds", "shop.orders"): AT.timestamp(),
        ("cdc_verified_through_timestamp_seconds", "shop.orders"): AT.timestamp() + 3600,
        ("cdc_verify_mismatched_rows", "shop.orders"): 3,
        ("cdc_verify_mismatched_rows", "shop.items"): 0,
    }


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ({"sinks": ["nowhere"]}, (404, "CDC-5010")),
        ({"mode": "guess"}, (422, "CDC-1000")),
        ({"rate": 5}, (422, "CDC-1000")),
        ({"repair": True, "against": "log"}, (422, "CDC-1000")),
        ({}, (409, "CDC-1006")),
    ],
)
def test_what_cannot_be_done_is_refused(client: httpx.Client, body: object, refused: tuple[int, str]) -> None:
    answer = client.post(VERIFY_PATH, json=body)
    assert (answer.status_code, answer.json()["code"]) == refused


def test_a_comparison_runs_in_a_child_and_leaves_its_report(tmp_path: Path) -> None:
    ground = make_shop(tmp_path)
    with Catalog.open(ground.definition.catalog.url) as catalog:
        app = create_app(catalog, ground.definition, str(tmp_path / "log"), file=tmp_path / "shop.yaml")
        with answering(app) as url, client_of(url, timeout=60) as client:
            asked = client.post(VERIFY_PATH, json={"against": "log", "tables": ["shop.orders"]})
            assert (asked.status_code, asked.json()["state"]) == (202, "running")
            again = client.post(VERIFY_PATH, json={})
            last = until(lambda: (s := client.get(VERIFY_PATH).json()["last"])["finished_at"] and s, "it to end")
    assert again.status_code == 409
    # no sink of it has ever been applied
    assert (last["state"], last["error"]["code"], last["request"]["against"]) == ("failed", "CDC-5003", "log")


def test_tables_that_differ_are_told_from_a_comparison_that_failed(catalog: Catalog) -> None:
    outcomes = {
        "equal": {"ok": True, "summary": "2/2", "result": {}, "error": None},
        "differs": {"ok": False, "summary": "1/2", "result": {}, "error": {"code": "CDC-6001"}},
        "failed": {"ok": False, "summary": "no cut", "result": None, "error": {"code": "CDC-5003"}},
    }
    for state, outcome in outcomes.items():
        job = catalog.commands.post(NAME, VERIFY, ASKED)
        (command,) = catalog.commands.pending(NAME, VERIFY)
        assert verify_status(command).state == "running"
        catalog.commands.finish(job, outcome, ok=outcome["ok"] is True)
        (command,) = catalog.commands.ls(NAME, VERIFY, limit=1)
        assert (verify_status(command).state, verify_status(command).summary) == (state, outcome["summary"])
