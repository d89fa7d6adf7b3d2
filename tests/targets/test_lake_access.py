"""A lake in an object store that refuses access."""

from __future__ import annotations

import pytest

from cdc.errors import LakeInaccessible, LogInaccessible, Reaction
from cdc.targets.lake_access import access_error
from cdc.targets.lake_reader import Lake
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.fixtures.s3 import KEY, KEY_ID, S3, Relay


@pytest.fixture(name="access", autouse=True)
def _access(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process reach the store, with credentials."""
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, text in variables.items():
        monkeypatch.setenv(name, text)


def refusal(lake: object) -> LakeInaccessible:
    """Return the error of reading the published record of a lake; the sink that opens it fails for the same reason."""
    template = f"{lake}/{{schema}}/{{table}}"
    with pytest.raises(OSError) as raised:
        DeltaSink(DeltaSettings("lake", template)).open("log")
    with pytest.raises(LakeInaccessible) as read:
        Lake.open(template).published()
    of_sink = access_error(raised.value, "a target")
    assert of_sink is not None
    assert of_sink.message.partition(": ")[2] == read.value.message.partition("accessed: ")[2]
    return read.value


def test_a_lake_without_credentials_is_reported(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    error = refusal(s3.root())
    assert error.message.endswith("cannot be accessed: this process has no credentials for the object store")
    assert error.reaction is Reaction.RETRY


def test_a_lake_in_a_bucket_that_does_not_exist_is_reported() -> None:
    assert refusal("s3://never-made/lake").message == (
        "the published record 's3://never-made/lake/_cdc/published' cannot be accessed: the bucket does not exist"
    )


def test_a_request_that_the_store_denies_is_reported(s3: S3, relay: Relay) -> None:
    # not with delta-rs, which blocks the threads of the relay while it waits for an answer
    file = s3.root(port=relay.port) / "file"
    relay.fault(".", 403, times=100)
    with pytest.raises(LogInaccessible) as raised:
        file.read_bytes()

    error = access_error(raised.value.__cause__ or raised.value, "a target")
    assert error is not None
    assert error.message == "a target cannot be accessed: the object store denies access"


def test_an_error_of_another_kind_is_not_one_of_access() -> None:
    assert access_error(OSError("Generic S3 error: error sending request: 503 Slow Down"), "a target") is None
