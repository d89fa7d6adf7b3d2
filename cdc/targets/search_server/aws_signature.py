"""AWS signature: signs requests to Amazon OpenSearch Service with Signature Version 4, by botocore.

botocore finds the credentials in the environment, in a profile, or from the role of the machine, and refreshes them
before they expire. It is an optional dependency, so it is imported only for a sink with `aws` in `server`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote, unquote

import httpx

from cdc.config.search_server import AwsSigning
from cdc.errors import AwsSigningUnavailable

_UNRESERVED: Final = "-_.~"
_SERVICE: Final = "es"
"""Amazon OpenSearch Service, as signatures name it."""


class AwsSignature(httpx.Auth):
    """Signs every attempt of a request; any thread may use an instance."""

    requires_request_body = True

    def __init__(self, aws: AwsSigning) -> None:
        """Raise AwsSigningUnavailable if botocore is not installed, or if it finds no credentials."""
        try:
            from botocore.auth import SigV4Auth
            from botocore.awsrequest import AWSRequest
            from botocore.exceptions import BotoCoreError
            from botocore.session import get_session
        except ImportError as exc:
            raise AwsSigningUnavailable(f"requests cannot be signed for AWS without botocore: {exc}") from exc
        self._aws, self._signer, self._request, self._failure = aws, SigV4Auth, AWSRequest, BotoCoreError
        try:
            self._credentials: Any = get_session().get_credentials()
        except BotoCoreError as exc:
            raise self._unavailable(exc) from exc
        if self._credentials is None:
            raise AwsSigningUnavailable(
                "no AWS credentials were found in the environment, in a profile, or for the role of this machine"
            )

    def auth_flow(self, request: httpx.Request) -> Iterator[httpx.Request]:  # type: ignore[override] # nothing is sent
        """Add the headers of the signature."""
        request.url = request.url.copy_with(raw_path=_encoded(request.url.raw_path.decode("ascii")).encode("ascii"))
        # other headers are not signed, because clients and proxies change them
        signed = self._request(method=request.method, url=str(request.url), data=request.content)
        try:
            credentials = self._credentials.get_frozen_credentials()
            self._signer(credentials, _SERVICE, self._aws.region).add_auth(signed)
        except self._failure as exc:
            raise self._unavailable(exc) from exc
        request.headers.update(dict(signed.headers.items()))
        yield request

    @staticmethod
    def _unavailable(exc: Exception) -> AwsSigningUnavailable:
        return AwsSigningUnavailable(f"AWS credentials cannot be read: {exc}")


def _encoded(target: str) -> str:
    """Return path and query with every reserved character encoded, apart from `/` in the path, and `&` and `=`.

    The signature covers the encoded form. A server that receives `*` or `,` unencoded may sign another form.
    """
    path, mark, query = target.partition("?")
    pairs = [part.partition("=") for part in query.split("&")]
    encoded = [f"{_strict(name)}{equals}{_strict(value)}" for name, equals, value in pairs]
    segments = [_strict(segment) for segment in path.split("/")]
    return f"{'/'.join(segments)}{mark}{'&'.join(encoded)}"


def _strict(text: str) -> str:
    return quote(unquote(text), safe=_UNRESERVED)
