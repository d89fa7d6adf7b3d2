"""Requests signed for AWS: a server that checks every signature accepts a whole sink, and no secret is shown."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cdc.config import SearchSinkDefinition
from cdc.errors import AwsSigningUnavailable, SearchServerDenied
from cdc.logging_setup import LogFormat, configure
from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.reader import SearchServerReader
from tests.contracts.folded import ORDERS, batch, gone, part, put
from tests.fixtures.aws_signatures import SignatureCheck, SignedRequest
from tests.fixtures.http_relay import Answer, HttpRelay
from tests.fixtures.opensearch import SharedOpenSearch
from tests.fixtures.search_sinks import search_sink
from tests.pipelines.sinks.search_server.server_sink import items, merge, opened

REGION = "eu-central-1"
SECRET = "canary/secret+key"
TOKEN = "canary-token"


@pytest.fixture(autouse=True)
def _no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the credentials of the machine on which the tests run."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture(name="credentials")
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)


def signed_sink(opensearch: SharedOpenSearch, relay: HttpRelay) -> SearchSinkDefinition:
    return search_sink(opensearch, url=relay.url, aws={"region": REGION})


def test_the_check_of_these_tests_finds_the_signature_that_aws_publishes() -> None:
    # the example of the AWS General Reference, "Signature Version 4 signing process"
    headers = {
        "content-type": "application/x-www-form-urlencoded; charset=utf-8",
        "host": "iam.amazonaws.com",
        "x-amz-date": "20150830T123600Z",
    }
    request = SignedRequest("GET", "/?Action=ListUsers&Version=2010-05-08", headers, b"")
    signature = request.signature(
        "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "20150830/us-east-1/iam", "content-type;host;x-amz-date"
    )

    assert signature == "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"


@pytest.mark.usefixtures("credentials")
def test_every_request_of_a_sink_and_of_its_reader_has_the_right_signature(
    opensearch: SharedOpenSearch, opensearch_relay: HttpRelay
) -> None:
    check = opensearch_relay.check = SignatureCheck({"AKID": SECRET}, REGION)
    find, schema = signed_sink(opensearch, opensearch_relay), ORDERS
    sink = opened(find)
    merge(
        sink,
        batch([put(1, "é & +*,:", 10), put(2, "b", 11)], 0, 20),
        batch([gone(2, 30), part(1, 31, {3: "2"})], 20, 40),
    )
    reader = SearchServerReader.open(find)
    found = [*reader.search(schema.topic, "é"), *reader.page(schema.topic, "*", 5).rows]
    with SearchClient(find.access, "opensearch") as client:
        names = client.ask(
            "GET", f"/{opensearch.prefix}*,-{opensearch.prefix}none*/_mapping?expand_wildcards=open,hidden"
        )
        client.ask("PUT", f"/{opensearch.prefix}a/_doc/x%20y%2Fz+%25~", {"n": 1})
        document = client.ask("GET", f"/{opensearch.prefix}a/_doc/x%20y%2Fz%2B%25~").body

    assert check.refused == []
    assert len(check.keys) > 20
    assert (items(find), len(found)) == ({"1": "é & +*,:"}, 2)
    assert (len(names.body), document["_id"]) == (2, "x y/z+%~")


@pytest.mark.usefixtures("credentials")
def test_an_attempt_that_is_repeated_is_signed_again(opensearch: SharedOpenSearch, opensearch_relay: HttpRelay) -> None:
    check = opensearch_relay.check = SignatureCheck({"AKID": SECRET}, REGION)
    opensearch_relay.fault("^GET", Answer(503), times=2)
    with SearchClient(signed_sink(opensearch, opensearch_relay).access, "opensearch") as client:
        client.check()

    assert (len(check.keys), check.refused) == (3, [])


@pytest.mark.usefixtures("credentials", "restored_logging")
def test_a_refused_signature_is_an_error_without_secrets_in_it_or_in_the_log(
    opensearch: SharedOpenSearch, opensearch_relay: HttpRelay, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(LogFormat.JSON, "DEBUG")
    opensearch_relay.check = SignatureCheck({"AKID": "another secret"}, REGION)
    find = signed_sink(opensearch, opensearch_relay)
    with SearchClient(find.access, "opensearch") as client, pytest.raises(SearchServerDenied) as denied:
        client.check()
    shown = f"{denied.value.message}{denied.value.fix}{find!r}{find.model_dump_json()}{capsys.readouterr()}"

    assert "signature we calculated does not match" in denied.value.message
    assert "canary" not in shown


def test_credentials_are_read_again_before_they_expire(
    opensearch: SharedOpenSearch, opensearch_relay: HttpRelay, tmp_path: Path
) -> None:
    count, printed = tmp_path / "count", {"Version": 1, "SecretAccessKey": SECRET}
    script = tmp_path / "credentials.py"
    expires = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
    script.write_text(
        f"import json, pathlib\ncount = pathlib.Path({str(count)!r})\n"
        "n = len(count.read_text()) if count.exists() else 0\ncount.write_text('x' * (n + 1))\n"
        f"print(json.dumps({printed!r} | {{'AccessKeyId': f'AKID{{n}}', 'Expiration': {expires!r}}}))\n"
    )
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    check = opensearch_relay.check = SignatureCheck({f"AKID{n}": SECRET for n in range(9)}, REGION)
    with SearchClient(signed_sink(opensearch, opensearch_relay).access, "opensearch") as client:
        client.check()
        client.check()

    assert check.refused == []
    assert len(set(check.keys)) == 2


def test_missing_credentials_have_an_error_with_a_remedy(opensearch_relay: HttpRelay, opensearch) -> None:
    with pytest.raises(AwsSigningUnavailable, match="no AWS credentials") as missing:
        opened(signed_sink(opensearch, opensearch_relay))

    assert "AWS_PROFILE" in missing.value.fix
    assert opensearch_relay.seen == []


def test_credentials_that_cannot_be_read_have_the_same_error(
    opensearch_relay: HttpRelay, opensearch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("[default]\ncredential_process = /bin/false\n")
    with pytest.raises(AwsSigningUnavailable, match="cannot be read"):
        opened(signed_sink(opensearch, opensearch_relay))


def test_a_missing_package_is_named(opensearch_relay: HttpRelay, opensearch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.auth", None)
    with pytest.raises(AwsSigningUnavailable, match="without botocore") as missing:
        opened(signed_sink(opensearch, opensearch_relay))

    assert "extra 'aws'" in missing.value.fix


@pytest.mark.parametrize("body", [{"message": "a\nb"}, {"Message": "a"}, {"error": "a"}], ids=json.dumps)
def test_the_reason_of_aws_is_its_first_line(
    opensearch_relay: HttpRelay, opensearch: SharedOpenSearch, body: dict[str, Any]
) -> None:
    opensearch_relay.fault("^GET", Answer(403, content=body))
    access = search_sink(opensearch, url=opensearch_relay.url).access
    with SearchClient(access, "opensearch") as client, pytest.raises(SearchServerDenied) as denied:
        client.check()

    assert denied.value.message.endswith("refuses GET /: a")
