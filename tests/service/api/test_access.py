"""Who may read and who may change something over the service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.types import Scope

from cdc.catalog import Catalog
from cdc.config import Secret
from cdc.config.definition import Service, is_loopback
from cdc.errors import CdcError, RequestRefused, Unauthorized
from cdc.service.api.access import refusal
from cdc.service.api.app import create_app
from cdc.snapshot.backfill_documents import BACKFILL
from tests.fixtures.waiting import until
from tests.service.pipeline import NAME, TOKEN, definition
from tests.service.running import answering, client_of

ASK = f"/api/v1/pipelines/{NAME}/backfills"
HERE = Service()
EVERYWHERE = Service(host="0.0.0.0")
GUARDED = Service(host="0.0.0.0").model_copy(update={"token": Secret(TOKEN)})
JSON = {"content-type": "application/json"}


def token_file(directory: Path) -> Path:
    file = directory / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    return file


def refused(service: Service, method: str = "POST", path: str = ASK, **headers: str) -> CdcError | None:
    given = {"host": "127.0.0.1:8083"} | {name.replace("_", "-"): value for name, value in headers.items()}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    scope: Scope = {"type": "http", "method": method, "path": path, "headers": raw}
    return refusal(scope, service)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.7.6", "localhost", "::1"])
def test_the_machines_own_names_are_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "10.0.0.1", "evil.example", "localhost.evil.example", "127.0.0.1.x"]
)
def test_everything_else_is_not(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8083", "[::1]:8083"])
def test_this_machine_may_change_something_with_json(host: str) -> None:
    assert refused(HERE, host=host, content_type="application/json; charset=utf-8") is None


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example", "content_type": "application/json"},
        {"host": "", "content_type": "application/json"},
        {"host": "[::1", "content_type": "application/json"},
        {"content_type": "text/plain"},
        {"content_type": "application/x-www-form-urlencoded"},
        {},
        {"content_type": "application/json", "origin": "http://evil.example"},
        {"content_type": "application/json", "origin": "http://127.0.0.1:9999"},
        {"content_type": "application/json", "origin": "null"},
    ],
)
def test_another_sites_page_makes_a_browser_change_nothing(headers: dict[str, str]) -> None:
    assert isinstance(refused(HERE, **headers), RequestRefused)


def test_the_services_own_page_may_change_something() -> None:
    assert refused(HERE, content_type="application/json", origin="http://127.0.0.1:8083") is None


def test_a_name_that_points_here_may_not_even_read() -> None:
    assert isinstance(refused(HERE, "GET", "/", host="evil.example"), RequestRefused)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_over_the_network_without_a_token_all_may_read_and_nobody_may_change(method: str) -> None:
    assert refused(EVERYWHERE, "GET", host="db.internal") is None
    error = refused(EVERYWHERE, method, content_type="application/json")
    assert isinstance(error, RequestRefused)
    assert "service.token" in error.fix


@pytest.mark.parametrize(
    "path", [ASK, "/api/v1/status", "/api/v1/openapi.json", "/page/events", "/healthz/../api/v1/status", "/none"]
)
@pytest.mark.parametrize(
    "carried", [None, "Bearer", "Bearer ", "Bearer canary", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer ü"]
)
def test_with_a_token_no_request_is_answered_that_lacks_it(path: str, carried: str | None) -> None:
    headers = {} if carried is None else {"authorization": carried}
    for method in ("GET", "POST"):
        error = refused(GUARDED, method, path, **headers)
        assert isinstance(error, Unauthorized)
        assert TOKEN not in error.message


def test_with_the_token_everything_is_answered_from_everywhere() -> None:
    for scheme in ("Bearer", "bearer"):
        assert refused(GUARDED, host="db.internal", authorization=f"{scheme} {TOKEN}") is None


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_probes_and_prometheus_need_no_token(path: str) -> None:
    assert refused(GUARDED, "GET", path) is None


def test_over_a_socket_the_token_opens_the_api_and_without_it_the_page_is_empty(
    catalog: Catalog, tmp_path: Path
) -> None:
    guarded = definition(tmp_path, token={"env": "SHOP_TOKEN"})
    with answering(create_app(catalog, guarded, "log")) as url, client_of(url) as client:
        answer = client.get("/api/v1/status")
        assert (answer.status_code, answer.json()["code"], answer.headers["www-authenticate"]) == (
            401,
            "CDC-5012",
            "Bearer",
        )
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        shell = client.get("/").text
        assert NAME not in shell.replace("cdc-", "")
        assert "data-locked" in shell
        client.headers["authorization"] = f"Bearer {TOKEN}"
        assert client.get("/api/v1/status").json()["name"] == NAME
        assert "data-locked" not in client.get("/").text
        assert client.post(ASK, json={"tables": ["shop.orders"]}).status_code == 202
        assert TOKEN not in client.get("/").text + client.get("/api/v1/status").text


def test_a_token_in_a_file_may_be_changed_while_the_service_runs(catalog: Catalog, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("the-first-of-two-tokens\n")
    file.chmod(0o600)
    guarded = definition(tmp_path, token={"file": str(file)})
    with answering(create_app(catalog, guarded, "log")) as url, client_of(url) as client:

        def status(token: str) -> int:
            return client.get("/api/v1/status", headers={"authorization": f"Bearer {token}"}).status_code

        assert (status("the-first-of-two-tokens"), status("the-second-of-two-tokens")) == (200, 401)
        file.write_text("the-second-of-two-tokens\n")
        assert (status("the-first-of-two-tokens"), status("the-second-of-two-tokens")) == (401, 200)


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda file: file.write_text(""), lambda file: file.write_text("short")]
)
def test_a_token_file_without_a_token_closes_the_door(
    catalog: Catalog, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    file = token_file(tmp_path)
    guarded = definition(tmp_path, token={"file": str(file)})
    with answering(create_app(catalog, guarded, "log")) as url, client_of(url) as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        assert client.get("/api/v1/status").status_code == 200
        damage(file)
        for given in (f"Bearer {TOKEN}", "Bearer", "Bearer short", ""):
            answer = client.get("/api/v1/status", headers={"authorization": given})
            assert (answer.status_code, answer.json()["code"]) == (401, "CDC-5012")
            assert "the token's file contains no valid token" in answer.json()["message"]
        assert "data-locked" in client.get("/").text
        file.write_text(TOKEN)
        assert client.get("/api/v1/status").status_code == 200


@pytest.mark.parametrize("path", ["/api/v1/events", "/page/events"])
def test_a_stream_ends_when_its_token_is_no_longer_valid(catalog: Catalog, tmp_path: Path, path: str) -> None:
    file = token_file(tmp_path)
    guarded = definition(tmp_path, token={"file": str(file)})
    app = create_app(catalog, guarded, "log")
    headers = {"authorization": f"Bearer {TOKEN}"}
    with (
        answering(app) as url,
        client_of("", timeout=30) as client,
        client.stream("GET", url + path, headers=headers) as a,
    ):
        lines = a.iter_lines()
        assert next(lines).startswith("event: ")
        file.unlink()
        assert not [line for line in lines if line.startswith("event: ")][3:]
        until(lambda: app.state.sampler.streams == 0, "the stream given back")


def test_a_refused_request_starts_nothing(catalog: Catalog, tmp_path: Path) -> None:
    with answering(create_app(catalog, definition(tmp_path), "log")) as url, client_of(url) as client:
        for headers in ({"content-type": "text/plain"}, JSON | {"host": "evil.example"}):
            answer = client.post(ASK, content='{"tables": ["shop.orders"]}', headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (403, "CDC-5013")
            assert set(answer.json()) == {"code", "message", "suggestion"}
    assert catalog.commands.ls(NAME, BACKFILL) == []
