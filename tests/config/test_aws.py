"""Keys of deliveries to AWS."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cdc.config.destinations import SqsDelivery

REQUIRED = {"name": "to_aws", "type": "sqs"}


@pytest.mark.parametrize(
    "endpoint",
    [
        "sqs.eu-central-1.amazonaws.com",
        "ftp://sqs.example.com",
        "http://sqs.example.com",
        "https://user:secret@sqs.example.com",
        "https://sqs.example.com?token=secret",
    ],
)
def test_an_endpoint_that_is_not_safe_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SqsDelivery.model_validate({**REQUIRED, "endpoint": endpoint})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:4566", "https://vpce-1.sqs.eu-central-1.vpce.amazonaws.com"])
def test_an_endpoint_on_this_machine_or_with_tls_is_taken(endpoint: str) -> None:
    assert SqsDelivery.model_validate({**REQUIRED, "endpoint": endpoint}).endpoint == endpoint


@pytest.mark.parametrize("queue", ["{table}.fifo", "{topic", "{topic}-{0}"])
def test_a_name_has_no_placeholder_but_the_topic(queue: str) -> None:
    with pytest.raises(ValidationError):
        SqsDelivery.model_validate({**REQUIRED, "queue": queue})
