"""The app: policies and headers of every response, the files that pages need, and what it does not load."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cdc.catalog import Catalog
from cdc.errors import UnknownName
from cdc.service.api.app import create_app
from tests.service.pipeline import definition
from tests.service.running import Clock, answering


def test_the_page_may_load_nothing_from_elsewhere(client: httpx.Client) -> None:
    page = client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text
    for path in ("/static/page.css", "/static/page.js", "/static/icon.svg"):
        assert client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/api/v1/none", "/api/v1/a%0Ab", "/a%0Ab"])
def test_a_path_without_a_route_is_answered_like_every_error(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.json()["code"]) == (404, UnknownName.code)
    assert "content-security-policy" in answer.headers


def test_apps_of_one_process_share_routes_and_nothing_else(catalog: Catalog, tmp_path: Path) -> None:
    shop, late = definition(tmp_path), Clock()
    late.ahead = 100
    with (
        answering(create_app(catalog, shop, shop.log.path)) as now,
        answering(create_app(catalog, shop, shop.log.path, late)) as then,
    ):
        assert [httpx.get(f"{url}/readyz", verify=False).status_code for url in (now, then, now)] == [200, 503, 200]


def test_a_foreign_host_name_that_points_here_is_refused(client: httpx.Client) -> None:
    assert client.get("/api/v1/status", headers={"host": "evil.example"}).status_code == 403


def test_a_server_that_nobody_asks_anything_loads_neither_log_nor_source() -> None:
    heavy = ("psycopg", "pyarrow", "deltalake", "numba")
    probe = f"import sys, cdc.service.api.server_process; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("page", ["/", "/docs"])
def test_everything_that_a_page_needs_is_served_here(client: httpx.Client, page: str) -> None:
    answer = client.get(page)
    policy = answer.headers["content-security-policy"]
    named = re.findall(r'(?:src|href)="(?!#)([^"]+)"', answer.text)
    assert {name for name in named if not name.startswith("/")} == set()
    assert {client.get(name).status_code for name in named} == {200}
    # whatever a script or a style sheet names beyond that, the browser does not fetch
    assert {
        word for word in policy.replace(";", "").split() if "//" in word or "unsafe" in word or word == "*"
    } == set()


def test_the_vendored_documentation_page_comes_with_its_licence(client: httpx.Client) -> None:
    for name in ("LICENSE", "NOTICE", "swagger-ui-bundle.js.LICENSE.txt"):
        assert client.get(f"/static/swagger-ui/{name}").status_code == 200
