"""Queries over the API: rows with their cut, the wait for a position, and the limits of a query."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from cdc.catalog import Catalog
from cdc.service.api.app import create_app
from cdc.targets.read_only_guard import kernel_version
from tests.fixtures.one_table_lake import OneTableLake
from tests.fixtures.waiting import until
from tests.service.pipeline import NAME, TOKEN, definition
from tests.service.running import answering, client_of

QUERY = f"/api/v1/pipelines/{NAME}/query"
LONG = "select repeat('x', 100000) from (select unnest(range(0, 1000)) from orders)"
"""A statement with an answer of 100 MB."""
ENDLESS = (
    "select count(*) from orders a, (select unnest(range(0, 1000000000)) as n) b, (select unnest(range(0, 1000))) c"
)


@pytest.fixture
def lake(tmp_path: Path) -> OneTableLake:
    return OneTableLake(tmp_path)


@pytest.fixture
def client(catalog: Catalog, tmp_path: Path) -> Iterator[httpx.Client]:
    shop = definition(tmp_path, token={"env": "SHOP_TOKEN"})
    with answering(create_app(catalog, shop, shop.log.path)) as url, client_of(url, timeout=60) as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        yield client


def query(client: httpx.Client, sql: str = "select id from orders order by id", **given: Any) -> httpx.Response:
    return client.post(QUERY, json={"sql": sql} | given)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    assert set(answer.json()) == {"code", "message", "suggestion"}
    return answer.status_code, answer.json()["code"]


def test_rows_come_with_their_cut(client: httpx.Client, lake: OneTableLake) -> None:
    lake.publish(20, 40)

    cut = {"position": "0/28", "committed_at": "1970-01-01T00:00:40.000Z", "apart": {}}
    assert query(client).json() == {"columns": ["id"], "rows": [[20], [40]], "more": False, "cut": cut}
    assert query(client, at="latest").json()["cut"] is None


def test_pages_come_from_the_cut_of_the_first_page(client: httpx.Client, lake: OneTableLake) -> None:
    lake.publish(20, 40)
    first = query(client, limit=1).json()
    lake.publish(60)

    at = first["cut"]["position"]
    second = query(client, "select id from orders order by id offset 1", at=at).json()

    assert (first["rows"], first["more"]) == ([[20]], True)
    assert (second["rows"], second["more"]) == ([[40]], False)


def test_a_query_waits_until_the_cut_has_the_position(client: httpx.Client, lake: OneTableLake) -> None:
    lake.publish(20)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(query, client, min_position="0/28", timeout="30s")
        assert refusal(query(client, min_position="0/28", timeout="50ms")) == (504, "CDC-5003")
        lake.publish(40)

        assert waiting.result().json()["rows"] == [[20], [40]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sql": "select * from nothing"}, (422, "CDC-1000")),
        ({"sql": "drop table orders"}, (422, "CDC-5014")),
        ({"sql": "select 1 / 0 from orders"}, (422, "CDC-5015")),
        ({"sql": "select 1", "at": "0/13"}, (409, "CDC-3015")),
        ({"sql": "select 1", "sink": "other"}, (404, "CDC-5010")),
        ({"sql": "select 1", "at": "latest", "min_position": "0/1"}, (422, "CDC-1000")),
        ({"sql": "select 1", "limit": 1_001}, (422, "CDC-1000")),
    ],
)
def test_a_query_that_cannot_be_answered_is_refused(
    client: httpx.Client, lake: OneTableLake, given: dict[str, Any], expected: tuple[int, str]
) -> None:
    lake.publish(20)

    assert refusal(client.post(QUERY, json=given)) == expected


def test_a_query_that_was_stopped_does_not_harm_the_next_one(client: httpx.Client, lake: OneTableLake) -> None:
    lake.publish(20)

    assert refusal(query(client, LONG)) == (422, "CDC-5019")
    assert query(client).json()["rows"] == [[20]]


@pytest.mark.skipif(kernel_version() == 0, reason="the kernel has no Landlock")
def test_a_query_cannot_write_a_file(client: httpx.Client, lake: OneTableLake, tmp_path: Path) -> None:
    lake.publish(20)

    assert refusal(query(client, f"copy (select 1) to '{tmp_path / 'written.csv'}'")) == (422, "CDC-5014")
    assert not (tmp_path / "written.csv").exists()


def test_a_query_ends_with_its_client(client: httpx.Client, lake: OneTableLake) -> None:
    lake.publish(20)
    connection = HTTPConnection(client.base_url.host, client.base_url.port)
    headers = {"content-type": "application/json", **client.headers}
    connection.request("POST", QUERY, json.dumps({"sql": ENDLESS}), headers)
    until(query_processes, "a query process")
    connection.close()

    until(lambda: not query_processes(), "the end of the query process")
    assert query(client).json()["rows"] == [[20]]


def query_processes() -> list[int]:
    """The ids of the processes that run a query for a server in this process."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"cdc.service.query_process" in command and parent(parent(pid)) == os.getpid():
                found.append(pid)
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[1])


def test_a_query_needs_a_token(catalog: Catalog, tmp_path: Path) -> None:
    shop = definition(tmp_path)
    with answering(create_app(catalog, shop, shop.log.path)) as url, client_of(url) as client:
        assert refusal(query(client)) == (403, "CDC-5013")
