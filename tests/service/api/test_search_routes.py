"""Searches over the API: pages, the wait for a position, and each refusal with its status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cdc.catalog import Catalog
from cdc.config import Definition
from cdc.service.api.app import create_app
from cdc.service.api.route_context import MAX_SEARCHES
from tests.fixtures.search_stores import SearchStore, mugs, new_store
from tests.service.pipeline import NAME, TOKEN, definition
from tests.service.running import answering, client_of

SEARCH = f"/api/v1/pipelines/{NAME}/search"
MUG = {"table": "orders", "words": "mug"}


@contextlib.contextmanager
def served(catalog: Catalog, shop: Definition, sinks: Any) -> Iterator[httpx.Client]:
    """A client of the server of a pipeline with these sinks."""
    app = create_app(catalog, shop.model_copy(update={"sinks": sinks}), shop.log.path)
    with answering(app) as url, client_of(url, timeout=60) as client:
        yield client


@pytest.fixture
def client(catalog: Catalog, tmp_path: Path, search_store: SearchStore) -> Iterator[httpx.Client]:
    shop = definition(tmp_path, token={"env": "SHOP_TOKEN"})
    with served(catalog, shop, search_store.definition.sinks) as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        yield client


def search(client: httpx.Client, **changed: Any) -> httpx.Response:
    return client.get(SEARCH, params=MUG | changed)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    assert set(answer.json()) == {"code", "message", "suggestion"}
    return answer.status_code, answer.json()["code"]


def test_pages_follow_each_other_with_their_position(client: httpx.Client, search_store: SearchStore) -> None:
    search_store.publish(mugs(range(5)), 20)
    first = search(client, limit=3)
    second = search(client, limit=3, after=first.json()["next"])

    rows = first.json()["rows"] + second.json()["rows"]
    assert sorted(row["key"][0] for row in rows) == ["0", "1", "2", "3", "4"]
    assert rows[0]["row"].keys() == {"id", "item", "price"}
    assert (second.json()["next"], second.json()["topic"], second.json()["position"]) == (None, "shop.orders", "0/14")
    assert (first.headers["cdc-position"], first.headers["content-type"]) == ("0/14", "application/json")

    search_store.publish(mugs([5], 25), 40)

    assert refusal(search(client, limit=3, after=first.json()["next"])) == (409, "CDC-3015")


def test_an_answer_that_the_client_has_is_not_sent_again(client: httpx.Client, search_store: SearchStore) -> None:
    search_store.publish(mugs([1]), 20)
    tag = search(client).headers["etag"]
    same = client.get(SEARCH, params=MUG, headers={"if-none-match": f'"x", W/{tag}'})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    assert same.headers["cdc-position"] == "0/14"

    search_store.publish(mugs([1], 25), 40)

    assert client.get(SEARCH, params=MUG, headers={"if-none-match": tag}).status_code == 200


def test_searches_that_wait_do_not_delay_others(client: httpx.Client, search_store: SearchStore) -> None:
    search_store.publish(mugs([1]), 20)
    with ThreadPoolExecutor(3 * MAX_SEARCHES) as pool:
        waiting = [
            pool.submit(search, client, min_position="0/15", timeout="60s", limit=n) for n in range(1, 3 * MAX_SEARCHES)
        ]
        assert search(client).json()["position"] == "0/14"
        assert client.get("/healthz").status_code == 200
        assert not any(request.done() for request in waiting)

        search_store.publish(mugs([2], 25), 40)

        assert {request.result().json()["position"] for request in waiting} == {"0/28"}
    late = search(client, min_position="0/29", timeout="50ms")
    assert refusal(late) == (504, "CDC-5003")
    assert "is at 0/28: it did not reach 0/29 within 0.05 s" in late.json()["message"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"table": "none"}, (404, "CDC-5010")),
        ({"sink": "none"}, (404, "CDC-5010")),
        ({"after": "nonsense"}, (422, "CDC-1000")),
        ({"min_position": "nonsense"}, (422, "CDC-1003")),
        ({"timeout": "61s"}, (422, "CDC-1000")),
        ({"timeout": "5"}, (422, "CDC-1000")),
        ({"limit": 1_001}, (422, "CDC-1000")),
        ({"words": ""}, (422, "CDC-1000")),
        ({"minimum": "0/14"}, (422, "CDC-1000")),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(
    catalog: Catalog, tmp_path: Path, changed: dict[str, Any], expected: tuple[int, str]
) -> None:
    store = new_store(tmp_path)
    store.publish(mugs([1]), 20)
    shop = definition(tmp_path, token={"env": "SHOP_TOKEN"})
    with served(catalog, shop, store.definition.sinks) as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        assert refusal(search(client, **changed)) == expected


def test_a_sink_without_an_index_is_unavailable(client: httpx.Client) -> None:
    assert refusal(search(client)) == (503, "CDC-3003")


def test_rows_are_returned_only_to_clients_with_the_token(catalog: Catalog, tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.publish(mugs([1]), 20)
    with served(catalog, definition(tmp_path), store.definition.sinks) as client:
        assert refusal(search(client)) == (403, "CDC-5013")
    with served(catalog, definition(tmp_path, token={"env": "SHOP_TOKEN"}), store.definition.sinks) as client:
        assert refusal(search(client)) == (401, "CDC-5012")


def test_the_description_has_parameters_headers_and_refusals(client: httpx.Client) -> None:
    described = client.get("/api/v1/openapi.json").json()["paths"]["/api/v1/pipelines/{pipeline}/search"]["get"]
    parameters = {parameter["name"]: parameter for parameter in described["parameters"]}
    assert {"table", "words", "limit", "after", "min_position", "timeout", "sink"} < parameters.keys()
    assert all(parameter["description"] for parameter in parameters.values())
    assert set(described["responses"]["200"]["headers"]) == {"CDC-Position", "ETag"}
    assert {"401", "403", "404", "409", "422", "503", "504"} < described["responses"].keys()
