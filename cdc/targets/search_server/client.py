"""Client of a search server: sends requests, retries while the server is busy, and gives each failure its own error.

The client is httpx, because OpenSearch and Elasticsearch have the same HTTP interface for everything that cdc needs,
while the client library of each product refuses the server of the other. Every request may be sent twice: writes have
external versions, or say which version they replace. So a lost answer is no problem.
"""

from __future__ import annotations

import json
import random
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from time import time
from typing import Any, Final, Self

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay

from cdc.back_off import BackOff
from cdc.config.search_server import SearchServer
from cdc.errors import (
    CdcError,
    DocumentTooLarge,
    IndexFieldLimitExceeded,
    IndexMappingConflict,
    IndexMissing,
    IndexReadOnly,
    SearchCertificateRejected,
    SearchRequestRefused,
    SearchServerDenied,
    SearchServerUnsupported,
    SinkUnavailable,
)
from cdc.targets.search_server.aws_signature import AwsSignature
from cdc.targets.search_server.document_values import parse_document

RETRY_FOR: Final = 20.0
"""Seconds for which a request is sent again while the server is busy or does not answer; then the sink retries."""
PAUSES: Final = BackOff(0.1, 5.0)
LONGEST_PAUSE: Final = 15.0
"""Maximum seconds that a server can request with `Retry-After`."""
BUSY: Final = frozenset({429, 502, 503, 504})
"""Statuses of a server that will probably accept the same request later."""
BLOCKED: Final = "cluster_block_exception"
"""Error type of an index that accepts no writes; the status of the answer may be 403 or 429."""
VERSIONS: Final = {"opensearch": (2, 3), "elasticsearch": (8, 9)}
"""Engine → its supported major versions."""
_JSON: Final = {"Content-Type": "application/json"}
_LINES: Final = {"Content-Type": "application/x-ndjson"}
_LONGEST_REASON: Final = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: its status and its parsed JSON."""

    status: int
    body: Any

    @property
    def error_type(self) -> str:
        """The type of the error in the body; empty if there is none."""
        return error_type(self.body)


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    content: bytes | None
    headers: Mapping[str, str]
    exact: bool = False


class SearchClient:
    """Connections to one search server; any thread may use an instance."""

    def __init__(self, access: SearchServer, engine: str, *, retry_for: float = RETRY_FOR) -> None:
        self.engine = engine
        self.index_prefix = access.index.partition("{")[0]
        """Text with which the names of all indexes of the sink begin; users and privileges can be limited to it."""
        self._access, self._retry_for = access, retry_for
        self._http = httpx.Client(
            base_url=access.url,
            auth=None if access.aws is None else AwsSignature(access.aws),
            verify=_tls(access),
            timeout=httpx.Timeout(access.timeout, connect=5.0),
            limits=httpx.Limits(max_connections=access.bulk_requests + 4),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def check(self) -> None:
        """Raise SearchServerUnsupported if the server is another product than the definition names, or too old."""
        answer = self.ask("GET", "/", allowed=(HTTPStatus.NOT_FOUND,))
        if answer.status == HTTPStatus.NOT_FOUND:
            raise SearchServerUnsupported(
                f"the server at {self._access.url} has no version at '/'; Amazon OpenSearch Serverless cannot be "
                "used, because it cannot refresh an index on request",
                remedy="correct 'url' in 'server', or use a domain of Amazon OpenSearch Service",
            )
        version = answer.body.get("version", {})
        product = version.get("distribution", "elasticsearch")
        number = str(version.get("number", ""))
        major = number.partition(".")[0]
        if product != self.engine or not major.isdigit() or int(major) not in VERSIONS[self.engine]:
            raise SearchServerUnsupported(
                f"the server at {self._access.url} is {product} {number or 'of unknown version'}: expected "
                f"{self.engine} {' or '.join(map(str, VERSIONS[self.engine]))}"
            )

    def ask(
        self, method: str, path: str, body: Any = None, *, allowed: Iterable[int] = (), exact: bool = False
    ) -> Answer:
        """Send a request and return the answer; exact: parse it as `parse_document` does.

        Raises the error for a status that is neither a success nor in `allowed`. While the server is busy, the request
        is sent again for some seconds; then SinkUnavailable is raised.
        """
        content = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        retrying = Retrying(
            retry=retry_if_exception_type(_Busy), wait=_pause, stop=stop_after_delay(self._retry_for), reraise=True
        )
        answer: Answer = retrying(self._once, _Request(method, path, content, _JSON, exact))
        if answer.status >= HTTPStatus.BAD_REQUEST and answer.status not in allowed:
            raise self.error(answer, f"{method} {path.partition('?')[0]}")
        return answer

    def bulk(self, path: str, lines: bytes) -> Answer:
        """Send a bulk request once, and return the answer.

        The answer may say that the server is busy or that the request is too large; the caller sends the items again.
        Without an answer, the status is 0.
        """
        try:
            return self._once(_Request("POST", path, lines, _LINES))
        except _Busy as busy:
            return Answer(busy.status, {"retry_after": busy.pause, "error": busy.message})

    def error(self, answer: Answer, request: str) -> CdcError:
        """Return the error of an answer with an error status. request: description of the request, for the message."""
        reason = error_reason(answer.body) or f"status {answer.status}"
        message = f"search server {self._access.url} refuses {request}: {reason}"
        return classify(answer.status, answer.error_type, reason)(message)

    def _once(self, request: _Request) -> Answer:
        headers = {**request.headers, **self._login()}
        try:
            response = self._http.request(request.method, request.path, content=request.content, headers=headers)
        except httpx.HTTPError as exc:
            raise self._failure(exc, request.method) from exc
        answer = Answer(response.status_code, _parsed(response, exact=request.exact))
        if answer.status in BUSY and answer.error_type != BLOCKED:
            reason = error_reason(answer.body) or "too many requests"
            raise _Busy(
                f"search server {self._access.url} is busy: status {answer.status}, {reason}",
                answer.status,
                _retry_after(response.headers.get("Retry-After")),
            )
        return answer

    def _login(self) -> dict[str, str]:
        access = self._access
        if access.api_key is not None:
            return {"Authorization": f"ApiKey {access.api_key.current()}"}
        if access.user is None or access.password is None:
            return {}
        basic = httpx.BasicAuth(access.user, access.password.current())
        request = next(basic.auth_flow(httpx.Request("GET", access.url)))
        return {"Authorization": request.headers["Authorization"]}

    def _failure(self, exc: httpx.HTTPError, method: str) -> CdcError:
        cause: BaseException | None = exc
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return SearchCertificateRejected(
                    f"the certificate of search server {self._access.url} is not accepted: {cause.verify_message}"
                )
            cause = cause.__cause__ or cause.__context__
        what = str(exc) or type(exc).__name__
        return _Busy(f"search server {self._access.url} does not answer a {method} request: {what}", 0, None)


class _Busy(SinkUnavailable):
    """A request that may succeed if it is sent again."""

    code = SinkUnavailable.code

    def __init__(self, message: str, status: int, pause: float | None) -> None:
        super().__init__(message)
        self.status = status
        self.pause = pause


def classify(status: int, kind: str, reason: str) -> type[CdcError]:
    """Return the class of the error for the status, error type and reason of an answer or of a bulk item."""
    if "total_fields.limit" in reason or "Limit of total fields" in reason:
        return IndexFieldLimitExceeded
    return _ERRORS.get(kind) or _ERRORS.get(status) or SinkUnavailable


_ERRORS: Final[Mapping[int | str, type[CdcError]]] = {
    BLOCKED: IndexReadOnly,
    "illegal_argument_exception": IndexMappingConflict,
    "index_not_found_exception": IndexMissing,
    "mapper_parsing_exception": IndexMappingConflict,
    "strict_dynamic_mapping_exception": IndexMappingConflict,
    HTTPStatus.BAD_REQUEST: SearchRequestRefused,
    HTTPStatus.UNAUTHORIZED: SearchServerDenied,
    HTTPStatus.FORBIDDEN: SearchServerDenied,
    HTTPStatus.NOT_FOUND: IndexMissing,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: DocumentTooLarge,
}
"""Error type or status → class of the error; the type takes precedence."""


def error_type(body: Any) -> str:
    """Return the error type in the body of an answer or in a bulk item; an empty text if there is none."""
    error = body.get("error") if isinstance(body, Mapping) else None
    return str(error.get("type", "")) if isinstance(error, Mapping) else ""


def error_reason(body: Any) -> str:
    """Return the reason in the body of an answer or in a bulk item, shortened; an empty text if there is none."""
    fields = body if isinstance(body, Mapping) else {}
    error = fields.get("error")
    if not isinstance(error, Mapping):
        # AWS answers in words of its own; after the first line follow the headers of the request, with a session token
        text = str(error or fields.get("message") or fields.get("Message") or "")
        return text.partition("\n")[0][:_LONGEST_REASON]
    return f"{error.get('type', 'error')}: {error.get('reason', '')}"[:_LONGEST_REASON]


def _tls(access: SearchServer) -> ssl.SSLContext | bool:
    if not access.url.startswith("https://"):
        return False
    context = ssl.create_default_context(cafile=access.ca_file)
    if access.insecure_skip_tls_verification:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _parsed(response: httpx.Response, *, exact: bool) -> Any:
    if not response.content:
        return {}
    try:
        return parse_document(response.content) if exact else json.loads(response.content)
    except ValueError:
        return {"error": response.text[:_LONGEST_REASON]}


def _retry_after(header: str | None) -> float | None:
    if header is None:
        return None
    try:
        seconds = float(header) if header.strip().isdigit() else parsedate_to_datetime(header).timestamp() - time()
    except ValueError:
        return None
    return min(LONGEST_PAUSE, max(0.0, seconds))


def _pause(state: RetryCallState) -> float:
    failure = None if state.outcome is None else state.outcome.exception()
    asked = failure.pause if isinstance(failure, _Busy) else None
    pause = PAUSES.seconds(state.attempt_number) if asked is None else asked
    return pause * (1 + random.random() / 4)  # noqa: S311 - spreads attempts, guards nothing
