"""The client of a search server: what it sends again, and which error each failure is."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cdc.errors import (
    IndexFieldLimitExceeded,
    IndexMappingConflict,
    IndexMissing,
    SearchCertificateRejected,
    SearchServerDenied,
    SearchServerUnsupported,
    SinkUnavailable,
)
from cdc.targets.search_server.client import SearchClient
from tests.fixtures.http_relay import Answer, CutAnswer, DropRequest, HttpRelay, LoseAnswer
from tests.fixtures.opensearch import SharedOpenSearch
from tests.fixtures.search_sinks import search_sink


def connect(url: str, *, engine: str = "opensearch", retry_for: float = 10.0, **access: Any) -> SearchClient:
    sink = search_sink(SharedOpenSearch(url, "t-"), {"engine": engine}, **access)
    return SearchClient(sink.access, engine, retry_for=retry_for)


@pytest.mark.parametrize(
    "action", [DropRequest(), LoseAnswer(), CutAnswer(), Answer(503), Answer(429, retry_after=0)], ids=str
)
def test_a_request_without_a_good_answer_is_sent_again(opensearch, opensearch_relay: HttpRelay, action):
    fault = opensearch_relay.fault(r"^PUT", action, times=2)
    with connect(opensearch_relay.url) as client:
        client.ask("PUT", f"/{opensearch.prefix}a/_doc/1", {"n": 1})

        assert client.ask("GET", f"/{opensearch.prefix}a/_doc/1").body["_source"] == {"n": 1}
    assert fault.done == 2


def test_a_server_that_stays_busy_is_unavailable(opensearch_relay: HttpRelay):
    opensearch_relay.fault(r"^GET", Answer(429), times=None)
    with connect(opensearch_relay.url, retry_for=0.5) as client, pytest.raises(SinkUnavailable, match="429"):
        client.ask("GET", "/")


def test_a_server_that_is_not_there_is_unavailable():
    with (
        connect("http://127.0.0.1:9", retry_for=0.3) as client,
        pytest.raises(SinkUnavailable, match="does not answer"),
    ):
        client.ask("GET", "/")


def test_an_error_has_its_own_class(opensearch):
    index = f"/{opensearch.prefix}a"
    with connect(opensearch.url) as client:
        with pytest.raises(IndexMissing):
            client.ask("GET", f"{index}/_mapping")
        client.ask("PUT", index, {"settings": {"index.mapping.total_fields.limit": 1}})
        with pytest.raises(IndexFieldLimitExceeded):
            client.ask("PUT", f"{index}/_mapping", {"properties": {"a": {"type": "long"}, "b": {"type": "long"}}})
        with pytest.raises(IndexMappingConflict):
            client.ask("PUT", f"{index}/_mapping", {"properties": {"a": {"type": "nothing"}}})


def test_numbers_of_an_exact_answer_keep_their_digits(opensearch):
    path = f"/{opensearch.prefix}a/_doc/1"
    with connect(opensearch.url) as client:
        client.ask("PUT", path, {"n": 9007199254740993})

        assert client.ask("GET", path, exact=True).body["_source"]["n"] == "9007199254740993"


def test_the_product_and_version_are_checked(opensearch, opensearch_relay: HttpRelay):
    with connect(opensearch.url) as client:
        client.check()
    with connect(opensearch.url, engine="elasticsearch") as client, pytest.raises(SearchServerUnsupported):
        client.check()
    old = {"version": {"distribution": "opensearch", "number": "1.3.0"}}
    opensearch_relay.fault(r"^GET / ?$", Answer(200, content=old))
    with connect(opensearch_relay.url) as client, pytest.raises(SearchServerUnsupported, match=r"1\.3\.0"):
        client.check()


def test_a_server_without_a_version_is_not_supported(opensearch_relay: HttpRelay):
    # as Amazon OpenSearch Serverless answers
    opensearch_relay.fault(r"^GET / ?$", Answer(404))
    with connect(opensearch_relay.url) as client, pytest.raises(SearchServerUnsupported, match="Serverless") as refused:
        client.check()
    assert "'url'" in refused.value.fix


@pytest.mark.parametrize("number", ["8.19.0", "9.2.1"])
def test_elasticsearch_is_known_by_its_first_answer(opensearch_relay: HttpRelay, number):
    # the body that the documentation of Elasticsearch shows, shortened
    body = {"cluster_name": "c", "version": {"number": number, "build_flavor": "default"}, "tagline": "You Know"}
    opensearch_relay.fault(r"^GET / ?$", Answer(200, content=body))
    with connect(opensearch_relay.url, engine="elasticsearch") as client:
        client.check()


@pytest.mark.parametrize(("status", "kind"), [(401, "security_exception"), (403, "security_exception")])
def test_rejected_credentials_have_an_error_of_their_own(opensearch_relay: HttpRelay, status, kind):
    content = {"error": {"type": kind, "reason": "missing authentication credentials"}, "status": status}
    opensearch_relay.fault(r"^GET", Answer(status, content=content))
    with connect(opensearch_relay.url) as client, pytest.raises(SearchServerDenied, match="missing authentication"):
        client.ask("GET", "/")


class _Recorder(BaseHTTPRequestHandler):
    seen: list[str | None]

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization"))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def recorder() -> Iterator[tuple[ThreadingHTTPServer, list[str | None]]]:
    seen: list[str | None] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Recorder,), {"seen": seen}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield server, seen
    server.shutdown()
    server.server_close()


def test_credentials_are_sent_and_a_secret_file_is_read_again(recorder, tmp_path: Path):
    server, seen = recorder
    secret = tmp_path / "secret"
    url = f"http://127.0.0.1:{server.server_address[1]}"
    ways: tuple[dict[str, Any], ...] = (
        {"user": "cdc", "password": {"file": str(secret)}},
        {"api_key": {"file": str(secret)}},
    )
    for keys in ways:
        for value in ("one", "two"):
            secret.write_text(value, encoding="utf-8")
            if value == "one":
                client = connect(url, **keys)
            client.ask("GET", "/")
        client.close()

    assert seen == ["Basic Y2RjOm9uZQ==", "Basic Y2RjOnR3bw==", "ApiKey one", "ApiKey two"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return key, cert


def test_the_certificate_is_verified(recorder, certificate):
    server, seen = recorder
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    port = server.server_address[1]
    wrong: tuple[tuple[str, dict[str, Any]], ...] = (
        (f"https://localhost:{port}", {}),
        (f"https://127.0.0.1:{port}", {"ca_file": str(cert)}),
    )
    for url, keys in wrong:
        with connect(url, **keys) as client, pytest.raises(SearchCertificateRejected):
            client.ask("GET", "/")
    assert seen == []
    with connect(f"https://localhost:{port}", ca_file=str(cert)) as client:
        client.ask("GET", "/")
    with connect(f"https://127.0.0.1:{port}", insecure_skip_tls_verification=True) as client:
        client.ask("GET", "/")
    assert len(seen) == 2
