"""Access to a service of AWS: keys of the deliveries `sqs`, `sns` and `kinesis`."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from cdc.config.deliveries import DeliverySettings
from cdc.config.field_types import Switch, Whole, invalid
from cdc.config.units import Seconds

_LOCAL: Final = ("localhost", "127.0.0.1", "::1")


def _endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise invalid("expected a URL, for example https://sqs.eu-central-1.amazonaws.com")
    if parts.username is not None or parts.query or parts.fragment:
        raise invalid("a URL of an endpoint has neither a user nor a query")
    if parts.scheme == "http" and parts.hostname not in _LOCAL:
        raise invalid("an endpoint that is not on this machine needs https")
    return text


class AwsDelivery(DeliverySettings):
    """Settings of every delivery to AWS. Credentials are found as AWS's own tools find them: environment, profile,
    role of the machine or of the pod.
    """

    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")] | None = None
    """Region of the service; default: `AWS_REGION` or the profile."""
    endpoint: Annotated[str, AfterValidator(_endpoint)] | None = None
    """URL of the service; default: the one of the region."""
    create: Switch = False
    """Whether to create queues, topics or streams that do not exist; otherwise the delivery waits until they exist."""
    parallel: Annotated[Whole, Field(ge=1, le=64)] = 8
    """Maximum number of requests at the same time; events of one key are never in two of them."""
    timeout: Annotated[Seconds, Field(ge=1)] = 30.0
    """Time without an answer after which the service counts as unreachable; default 30 seconds."""
