"""Deliveries over the API: what they are, and what is asked of them is a command with a line in the audit."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from cdc.catalog import Catalog, ProcessReport, SinkProgress
from cdc.catalog.delivery_requests import DELIVERY_PAUSES, REWIND_DELIVERY
from cdc.config.destinations import FileDelivery
from cdc.service.api.app import create_app
from tests.service.pipeline import NAME, definition, new_catalog
from tests.service.running import answering, client_of

DELIVERIES = f"/api/v1/pipelines/{NAME}/deliveries"


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with new_catalog(tmp_path) as opened:
        yield opened


@pytest.fixture
def client(catalog: Catalog, tmp_path: Path) -> Iterator[httpx.Client]:
    events = FileDelivery(type="file", name="events", path=str(tmp_path / "events"))
    shop = definition(tmp_path).model_copy(update={"deliveries": (events,)})
    with answering(create_app(catalog, shop, "log")) as url, client_of(url, timeout=60) as opened:
        yield opened


def test_a_delivery_is_listed_with_its_promise_and_progress(client: httpx.Client, catalog: Catalog) -> None:
    described = {
        "name": "events", "type": "file", "promise": "exactly once", "format": "cdc",
        "topic": "{pipeline}.{schema}.{table}", "paused": False,
    }  # fmt: skip
    nothing = {"state": "not started", "reason": None, "position": None, "lag_seconds": None}
    assert client.get(DELIVERIES).json() == [described | nothing]

    catalog.sinks.record(NAME, SinkProgress("events", 100, datetime(2026, 1, 2, tzinfo=UTC), 0.25, "running"))
    progress = {"state": "stopped", "reason": None, "position": "0/64", "lag_seconds": 0.25}
    assert client.get(DELIVERIES).json() == [described | progress]

    catalog.processes.report(ProcessReport(NAME, "deliver", 1, "running"))
    assert client.get(DELIVERIES).json() == [described | progress | {"state": "running"}]


def test_a_delivery_is_paused_once_and_resumed_once(client: httpx.Client, catalog: Catalog) -> None:
    assert client.post(f"{DELIVERIES}/events/pause", json={}).json() == {"delivery": "events", "changed": True}
    assert client.post(f"{DELIVERIES}/events/pause", json={}).json()["changed"] is False
    assert client.get(DELIVERIES).json()[0]["paused"] is True
    assert client.post(f"{DELIVERIES}/events/resume", json={}).json()["changed"] is True
    assert client.post(f"{DELIVERIES}/events/resume", json={}).json()["changed"] is False
    assert DELIVERY_PAUSES.paused(catalog, NAME) == frozenset()
    assert [line.action for line in catalog.audit.ls()] == ["delivery resume", "delivery pause"]


def test_a_rewind_is_a_command(client: httpx.Client, catalog: Catalog) -> None:
    answer = client.post(f"{DELIVERIES}/events/rewind", json={"position": "0/10"})
    assert (answer.status_code, answer.json()["position"]) == (202, "0/10")
    assert [one.payload for one in catalog.commands.pending(NAME, REWIND_DELIVERY)] == [
        {"delivery": "events", "position": "0/10"}
    ]
    assert client.post(f"{DELIVERIES}/events/rewind", json={"position": "yesterday"}).json()["code"] == "CDC-1003"


def test_an_unknown_delivery_is_refused(client: httpx.Client) -> None:
    answer = client.post(f"{DELIVERIES}/other/pause", json={})
    assert (answer.status_code, answer.json()["code"]) == (404, "CDC-5010")
