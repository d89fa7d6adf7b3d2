"""Clients of AWS services, and what their errors mean for a delivery."""

from __future__ import annotations

from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError, SSLError
from botocore.parsers import ResponseParserError

from cdc.config.destinations import AwsDelivery
from cdc.errors import (
    CdcError,
    DestinationDenied,
    DestinationFull,
    DestinationNotTrusted,
    DestinationUnavailable,
    EventRefused,
    TopicMissing,
)

FAILURES: Final = (BotoCoreError, ClientError, ResponseParserError)
"""Errors that a call of a client raises."""
_ATTEMPTS: Final = 2
_MISSING: Final = (
    "NonExistentQueue",
    "QueueDoesNotExist",
    "NotFound",
    "NotFoundException",
    "ResourceNotFoundException",
)
_DENIED: Final = (
    "AccessDenied", "AccessDeniedException", "AuthFailure", "AuthorizationError", "AuthorizationErrorException",
    "ExpiredToken", "ExpiredTokenException", "IncompleteSignature", "InvalidAccessKeyId", "InvalidClientTokenId",
    "InvalidSecurity", "KMSAccessDenied", "KMSAccessDeniedException", "KmsAccessDenied", "MissingAuthenticationToken",
    "NotAuthorized", "OptInRequired", "SignatureDoesNotMatch", "UnrecognizedClientException",
)  # fmt: skip
_THROTTLED: Final = (
    "KMSThrottlingException", "KmsThrottled", "LimitExceededException", "OverLimit",
    "ProvisionedThroughputExceededException", "RequestThrottled", "Throttled", "Throttling", "ThrottlingException",
)  # fmt: skip
_REFUSED: Final = ("InvalidMessageContents", "InvalidParameter", "InvalidParameterValue", "ValidationError")
"""Codes of single entries of a request that another attempt does not change."""


def new_client(service: str, settings: AwsDelivery) -> Any:
    """Return a client; it has not connected yet. Raises a CdcError if region or endpoint are not known."""
    config = Config(
        connect_timeout=settings.timeout,
        read_timeout=settings.timeout,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=settings.parallel,
        parameter_validation=True,
    )
    try:
        return boto3.session.Session().client(
            service, region_name=settings.region, endpoint_url=settings.endpoint, config=config
        )
    except (BotoCoreError, ValueError) as exc:
        raise DestinationUnavailable(
            f"the AWS client for {service!r} does not start: {type(exc).__name__}",
            remedy="set 'region' in the delivery, or AWS_REGION in the environment",
        ) from exc


def error_code(exc: Exception) -> str:
    """Return the code of an error that the service answered; otherwise the name of the exception."""
    if isinstance(exc, ClientError):
        return str(exc.response.get("Error", {}).get("Code", "")).rpartition(".")[2] or "Unknown"
    return type(exc).__name__


def is_missing(exc: Exception) -> bool:
    """Return True if the error means that a queue, topic or stream does not exist."""
    return error_code(exc) in _MISSING


def meaning(exc: Exception, what: str) -> CdcError:
    """Return what a failure of a call means. The text of the exception is omitted: it may contain content.

    what: names the call and the queue, topic or stream.
    """
    code = error_code(exc)
    if isinstance(exc, NoCredentialsError | PartialCredentialsError):
        return DestinationDenied(
            f"{what}: no AWS credentials were found", remedy="set AWS_ACCESS_KEY_ID and its secret, a profile or a role"
        )
    if isinstance(exc, SSLError):
        return DestinationNotTrusted(
            f"{what}: the certificate of the endpoint is not trusted",
            remedy="set AWS_CA_BUNDLE to the file with the certificate authority of the endpoint",
        )
    if code in _MISSING:
        return TopicMissing(f"{what}: it does not exist")
    if code in _DENIED:
        return DestinationDenied(f"{what}: AWS answered {code!r}")
    kind = DestinationFull if code in _THROTTLED else DestinationUnavailable
    return kind(f"{what}: AWS answered {code!r}" if isinstance(exc, ClientError) else f"{what}: {code}")


def refusal_of_entry(code: str, event_id: str) -> CdcError | None:
    """Return the error of an entry that the service refuses for ever; None if another attempt may succeed."""
    code = code.rpartition(".")[2]
    return EventRefused(f"AWS refused event {event_id!r} with {code!r}") if code in _REFUSED else None
