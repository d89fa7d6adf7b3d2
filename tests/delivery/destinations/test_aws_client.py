"""What failures of AWS mean: missing, denied and unreachable places, in bounded time and without secrets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from time import monotonic
from typing import Any, Final

import pytest

from cdc.config.destinations import AwsDelivery, KinesisDelivery, SnsDelivery, SqsDelivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import DeliveryIdentity, Destination
from cdc.errors import CdcError, DestinationDenied, DestinationFull, DestinationUnavailable, Reaction, TopicMissing
from tests.delivery.destinations.sending import event
from tests.fixtures.aws import Aws
from tests.fixtures.http_relay import Answer, Forward, HttpRelay, Reply

MODELS: Final[dict[str, type[AwsDelivery]]] = {"kinesis": KinesisDelivery, "sns": SnsDelivery, "sqs": SqsDelivery}
KINDS: Final = pytest.mark.parametrize("kind", sorted(MODELS))


@pytest.fixture(name="relay")
def _relay(aws: Aws) -> Iterator[HttpRelay]:
    with HttpRelay(aws.endpoint) as made:
        yield made


def opened(aws: Aws, kind: str, **given: Any) -> Destination:
    identity = DeliveryIdentity("shop", "to_aws", "0123456789abcdef")
    made = new_destination(MODELS[kind].model_validate(aws.settings(kind, **given)), identity)
    made.open()
    return made


def send_one(destination: Destination, topic: str) -> None:
    destination.send([event(1, topic, b"key", b"secret content")])
    destination.commit(b"1")


@KINDS
def test_a_place_that_does_not_exist_is_missing(aws: Aws, kind: str) -> None:
    destination = opened(aws, kind, create=False)
    with pytest.raises(TopicMissing, match="does not exist"):
        send_one(destination, f"{aws.prefix}.orders")
    destination.close()


class Denial:
    """Answers as AWS does to a principal without the privilege."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def reply(self, _body: bytes, _forward: Forward, /) -> Reply:
        if self._kind == "sns":
            error = "<Error><Type>Sender</Type><Code>AuthorizationError</Code><Message>secret content</Message></Error>"
            return Reply(403, {"Content-Type": "text/xml"}, f"<ErrorResponse>{error}</ErrorResponse>".encode())
        denied = json.dumps({"__type": "AccessDeniedException", "message": "secret content"}).encode()
        return Reply(400, {"Content-Type": "application/x-amz-json-1.1"}, denied)


@KINDS
def test_refused_credentials_are_a_denied_destination(aws: Aws, relay: HttpRelay, kind: str) -> None:
    relay.fault("POST", Denial(kind), times=None)
    account = {} if kind == "kinesis" else {"owner": "123456789012"}
    destination = opened(aws, kind, endpoint=relay.url, **account)
    with pytest.raises(DestinationDenied, match=r"Authorization|AccessDenied") as denied:
        send_one(destination, f"{aws.prefix}.orders")
    destination.close()

    assert "secret content" not in str(denied.value)


class Error:
    """Answers with an error of AWS."""

    def __init__(self, kind: str, code: str) -> None:
        self._kind, self._code = kind, code

    def reply(self, _body: bytes, _forward: Forward, /) -> Reply:
        if self._kind == "sns":
            content = f"<ErrorResponse><Error><Type>Sender</Type><Code>{self._code}</Code></Error></ErrorResponse>"
            return Reply(400, {"Content-Type": "text/xml"}, content.encode())
        return Reply(400, {"Content-Type": "application/x-amz-json-1.1"}, json.dumps({"__type": self._code}).encode())


@pytest.mark.parametrize(
    ("code", "expected"),
    [("ExpiredTokenException", DestinationDenied), ("ThrottlingException", DestinationFull)],
)
@KINDS
def test_expired_credentials_and_a_reached_limit_are_errors_of_their_own(
    aws: Aws, relay: HttpRelay, kind: str, code: str, expected: type[CdcError]
) -> None:
    # the client itself repeats a throttled call once
    relay.fault("POST", Error(kind, code), times=2 if expected is DestinationFull else 1)
    account = {} if kind == "kinesis" else {"owner": "123456789012"}
    destination = opened(aws, kind, endpoint=relay.url, **account)
    with pytest.raises(CdcError) as failed:
        send_one(destination, f"{aws.prefix}.orders")
    destination.close()
    destination.open()
    send_one(destination, f"{aws.prefix}.orders")
    destination.close()

    assert type(failed.value) is expected
    assert failed.value.reaction is Reaction.RETRY


@KINDS
def test_an_answer_that_is_not_of_aws_is_an_unavailable_destination(aws: Aws, relay: HttpRelay, kind: str) -> None:
    relay.fault("POST", Answer(502), times=None)
    destination = opened(aws, kind, endpoint=relay.url)
    with pytest.raises(DestinationUnavailable):
        send_one(destination, f"{aws.prefix}.orders")
    destination.close()


@KINDS
def test_a_server_that_does_not_answer_is_unavailable_in_bounded_time(aws: Aws, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        destination = opened(aws, kind, endpoint=endpoint, timeout="1s")
        began = monotonic()
        with pytest.raises(DestinationUnavailable):
            send_one(destination, "shop.orders")
        destination.close()

    assert monotonic() - began < 20


def test_without_credentials_the_destination_is_denied(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    destination = opened(aws, "sqs")
    with pytest.raises(DestinationDenied, match="no AWS credentials"):
        send_one(destination, "shop.orders")
    destination.close()
