"""Storage: what a definition says of an object store arrives, under the names that delta-rs and obstore know."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from deltalake import DeltaTable
from obstore.exceptions import UnknownConfigurationKeyError
from obstore.store import from_url

from cdc.bucket_files import CLIENT, BucketPath, as_root, options_of
from cdc.config import load_definition
from cdc.config.object_store import Storage, storage_keys
from cdc.errors import LogError

KEY = "c2VjcmV0LWtleQ=="
"""As Azure's are: base64."""
SECRETS = {"KEY": KEY, "SAS": "sv=2024&sig=signed", "TOKEN": "lent"}
AZURE = "abfss://logs@lake.dfs.core.windows.net/shop/log"
S3_SAID = (
    "endpoint: 'http://minio:9000', region: eu-1, virtual_hosted: true, access_key_id: cdc, "
    "secret_access_key: '${KEY}', session_token: {env: TOKEN}, allow_http: true"
)
AZURE_SAID = (
    "endpoint: 'http://azurite:1', account_name: lake, account_key: '${KEY}', sas_token: {env: SAS}, allow_http: true"
)
ACCOUNT = {"client_email": "cdc@lake", "private_key": "x", "private_key_id": "1", "disable_oauth": True}
SAID = {
    "s3://lake/shop/log": (
        S3_SAID,
        {
            "endpoint": "http://minio:9000",
            "region": "eu-1",
            "virtual_hosted_style_request": "true",
            "access_key_id": "cdc",
            "secret_access_key": KEY,
            "session_token": "lent",
            "bucket": "lake",
        },
    ),
    AZURE: (
        AZURE_SAID,
        {
            "endpoint": "http://azurite:1",
            "account_name": "lake",
            "account_key": KEY,
            "sas_key": SECRETS["SAS"],
            "container_name": "logs",
        },
    ),
    "gs://lake/shop/log": (
        "service_account: /run/account.json",
        {"service_account": "/run/account.json", "bucket": "lake"},
    ),
}
"""URL → all that log.storage can say for it, and what the store then is in the words of its client."""


def defined(folder: Path, path: str, said: str) -> BucketPath:
    """The place of the log of a definition."""
    file = folder / "shop.yaml"
    file.write_text(
        "version: 1\nname: shop\nsource: {dsn: 'host=127.0.0.1 dbname=shop user=cdc'}\ntables: [{match: shop.*}]\n"
        f"log: {{path: '{path}', storage: {{{said}}}}}\ncatalog: {{url: 'sqlite:///{folder}/catalog.db'}}\n"
        f"spark: {{checkpoint: '{folder}/checkpoint'}}\n"
    )
    root = load_definition(file, SECRETS).log.root
    assert isinstance(root, BucketPath)
    return root


@pytest.mark.parametrize("path", SAID)
def test_all_that_can_be_said_of_a_store_is_known_to_its_client(tmp_path: Path, path: str) -> None:
    said, expected = SAID[path]
    (tmp_path / "account.json").write_text(json.dumps(ACCOUNT))
    root = defined(tmp_path, path, said.replace("/run", str(tmp_path)))
    own = {name: value for name, value in root.options if name not in CLIENT}
    store: Any = from_url(root.bucket, config=own)  # type: ignore[call-overload]
    told = {name: text.replace(str(tmp_path), "/run") for name, text in store.config.items()}

    assert told == expected
    assert dict(root.options).get("allow_http") == ("true" if "allow_http" in said else None)
    given = Storage.model_fields.keys() & {part.partition(":")[0].strip() for part in said.split(",")}
    assert given == storage_keys(path.partition("://")[0])
    assert "secret" not in repr(root)


@pytest.mark.parametrize(
    ("path", "name"), [("s3://lake", "aws_regoin"), (AZURE, "azure_storage_acount"), ("gs://lake", "google_account")]
)
def test_an_option_that_is_not_known_would_be_refused(path: str, name: str) -> None:
    """So the names above are no free text."""
    with pytest.raises(UnknownConfigurationKeyError, match=name):
        as_root(path, ((name, "x"),)).exists()


@pytest.fixture(name="asked")
def _asked() -> Iterator[tuple[int, list[tuple[str, str | None]]]]:
    """The port of a server that has nothing, and what it was asked: path, and by whose authority."""
    seen: list[tuple[str, str | None]] = []

    class Nothing(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            seen.append((self.path, self.headers["authorization"]))
            self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()

        do_GET = do_HEAD = _answer  # noqa: N815 - the names of the standard library

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Nothing)
    serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    serving.start()
    yield server.server_address[1], seen
    server.shutdown()
    serving.join()
    server.server_close()


def by_obstore(root: BucketPath) -> None:
    (root / "x").exists()


def by_delta_rs(root: BucketPath) -> None:
    DeltaTable(str(root), storage_options=options_of(root))


@pytest.mark.parametrize("ask", [by_obstore, by_delta_rs])
@pytest.mark.parametrize(
    ("said", "authority"), [("account_key: '${KEY}'", "SharedKey lake:"), ("sas_token: '${SAS}'", None)]
)
def test_both_clients_ask_azure_with_what_the_definition_says(
    tmp_path: Path,
    asked: tuple[int, list[tuple[str, str | None]]],
    ask: Callable[[BucketPath], None],
    said: str,
    authority: str | None,
) -> None:
    port, seen = asked
    root = defined(
        tmp_path, AZURE, f"endpoint: 'http://127.0.0.1:{port}', allow_http: true, account_name: lake, {said}"
    )
    with suppress(LogError, OSError):
        ask(root)

    path, authorization = seen[0]
    assert path.startswith("/logs")
    assert "shop" in path
    if authority is None:
        assert "sig=signed" in path
    else:
        assert authorization is not None
        assert authorization.startswith(authority)
