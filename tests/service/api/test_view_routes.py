"""Views over the API: what they are, and what is asked of them is a command with a line in the audit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cdc.catalog import Catalog
from cdc.catalog.view_requests import ViewRequests, take_requests
from cdc.config.views import View
from cdc.service.api.app import create_app
from tests.service.pipeline import NAME, definition, new_catalog
from tests.service.running import answering, client_of

VIEWS = f"/api/v1/pipelines/{NAME}/views"
DOCUMENTS = View(name="shop.documents", key=("id",), sql="SELECT id FROM shop.orders")


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with new_catalog(tmp_path) as opened:
        yield opened


@pytest.fixture
def client(catalog: Catalog, tmp_path: Path) -> Iterator[httpx.Client]:
    shop = definition(tmp_path).model_copy(update={"views": (DOCUMENTS,)})
    with answering(create_app(catalog, shop, "log")) as url, client_of(url, timeout=60) as opened:
        yield opened


def test_a_view_is_listed_paused_and_resumed(client: httpx.Client, catalog: Catalog) -> None:
    (listed,) = client.get(VIEWS).json()
    assert (listed["name"], listed["key"], listed["state"], listed["paused"]) == (
        "shop.documents",
        ["id"],
        "not started",
        False,
    )
    view = f"{VIEWS}/shop.documents"

    assert client.post(f"{view}/pause", json={}).json() == {"view": "shop.documents", "changed": True}
    assert client.post(f"{view}/pause", json={}).json()["changed"] is False
    assert client.get(VIEWS).json()[0]["paused"] is True
    answer = client.post(f"{view}/refresh", json={})
    assert (answer.status_code, answer.json()) == (202, {"view": "shop.documents"})
    assert take_requests(catalog, NAME) == ViewRequests(("shop.documents",), frozenset({"shop.documents"}))
    assert client.post(f"{view}/resume", json={}).json()["changed"] is True
    assert client.post(f"{view}/resume", json={}).json()["changed"] is False
    assert take_requests(catalog, NAME) == ViewRequests()
    assert [line.action for line in catalog.audit.ls()] == ["view resume", "view refresh", "view pause"]


def test_an_unknown_view_is_refused(client: httpx.Client) -> None:
    for action in ("pause", "resume", "refresh"):
        answer = client.post(f"{VIEWS}/shop.other/{action}", json={})
        assert (answer.status_code, answer.json()["code"]) == (404, "CDC-5010")
