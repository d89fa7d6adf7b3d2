"""Bulk writer: sends lines to a search server in bulk requests, and decides what the answer to each line means.

Every line has an external version, so a line may be sent again at any time and in any order: an older version never
replaces a newer one. A line that the server has no capacity for is sent again. While that happens, fewer requests are
sent at once.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from cdc.back_off import BackOff
from cdc.errors import CdcError, DocumentRefused, DocumentTooLarge, SinkUnavailable
from cdc.targets.search_server.client import (
    BLOCKED,
    BUSY,
    RETRY_FOR,
    Answer,
    SearchClient,
    classify,
    error_reason,
    error_type,
)

PAUSES: Final = BackOff(0.1, 5.0)
"""Pauses after the server rejected requests as too many, unless it says when to come back."""
CALM: Final = 20
"""Number of requests in a row without a rejection after which one more request is sent at once."""
_PREVIEW: Final = (" in document with id ", ". Preview of field's value", " Preview of field's value")
"""Beginnings of the parts of a reason that may contain values of a row."""
_ANSWER: Final = "filter_path=errors,items.*.status,items.*.error.type,items.*.error.reason"
"""Query parameter that leaves out the rest of an answer, which has the index, id and version of each document. Every
item keeps its status, so the items still have the order of the lines.
"""
_REJECTED: Final = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE})


class Line(NamedTuple):
    """One document to write: its action and its source, as two lines of a bulk request."""

    number: int
    """Number by which the caller knows the document."""
    content: bytes


@dataclass(slots=True)
class _Progress:
    """The lines of one call that are not written yet."""

    fresh: Iterator[list[Line]]
    """Lines that were not sent yet, in parts; each part is for one request."""
    again: deque[list[Line]] = field(default_factory=deque)
    """Parts to send again."""
    refused: dict[int, CdcError] = field(default_factory=dict)
    failures: int = 0
    """Number of requests in a row of which at least one line was rejected as too many, or that got no answer."""
    failing_since: float | None = None
    resume_at: float = 0.0
    last_reason: str = ""


class BulkWriter:
    """Writes lines with several requests at once; one thread at a time may use an instance."""

    def __init__(self, client: SearchClient, *, size: int, requests: int, retry_for: float = RETRY_FOR) -> None:
        """size: maximum bytes of a request. requests: maximum number of requests at once."""
        self._client, self._size, self._requests, self._retry_for = client, size, requests, retry_for
        self._limit, self._calm = requests, 0

    @property
    def limit(self) -> int:
        """Number of requests that are sent at once at present."""
        return self._limit

    def write(self, alias: str, lines: Iterable[Line]) -> dict[int, CdcError]:
        """Write lines to the index behind an alias; return number → error of each document that the server refuses.

        The next lines are taken from `lines` while the server works on earlier ones.

        All other lines are written when this method returns. Raises SinkUnavailable if the server accepts nothing for
        some seconds, IndexMissing if the index was deleted, and other errors that concern the whole index.
        """
        progress = _Progress(self._divided(lines))
        path = f"/{alias}/_bulk?require_alias=true&{_ANSWER}"
        with ThreadPoolExecutor(self._requests, thread_name_prefix="bulk") as pool:
            running: dict[Future[Answer], list[Line]] = {}
            while (part := self._next(progress, len(running))) is not None or running:
                if part is not None:
                    lines_of_part = b"".join(line.content for line in part)
                    running[pool.submit(self._client.bulk, path, lines_of_part)] = part
                    continue
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    self._take(progress, running.pop(done), done.result())
        return progress.refused

    def _next(self, progress: _Progress, running: int) -> list[Line] | None:
        """Return the next part to send; None if enough requests are running, or if no part is left at present."""
        if running >= self._limit:
            return None
        part = progress.again.popleft() if progress.again else next(progress.fresh, None)
        if part is not None:
            time.sleep(max(0.0, progress.resume_at - time.monotonic()))
        return part

    def _take(self, progress: _Progress, part: list[Line], answer: Answer) -> None:
        """Record the answer to a request: which lines were written, are sent again, or are refused."""
        if answer.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            self._split(progress, part)
        elif answer.error_type != BLOCKED and (answer.status in BUSY or answer.status == 0):
            self._send_again(progress, part, answer.body)
        elif answer.status >= HTTPStatus.BAD_REQUEST:
            raise self._client.error(answer, "a bulk request")
        elif rejected := self._rejected(progress, part, answer.body):
            self._send_again(progress, rejected, answer.body)
        else:
            self._continue(progress)

    def _rejected(self, progress: _Progress, part: Sequence[Line], body: Mapping[str, Any]) -> list[Line]:
        """Return the lines that the server has no capacity for; record those that it refuses."""
        if not body["errors"]:
            return []
        rejected = []
        for line, item in zip(part, body["items"], strict=True):
            (outcome,) = item.values()
            status = outcome["status"]
            if status in BUSY and error_type(outcome) != BLOCKED:
                rejected.append(line)
                progress.last_reason = error_reason(outcome)
            elif status in _REJECTED:
                progress.refused[line.number] = refusal(outcome)
            elif status >= HTTPStatus.BAD_REQUEST and status != HTTPStatus.CONFLICT:
                reason = error_reason(outcome)
                raise classify(status, error_type(outcome), reason)(f"the search server refuses a document: {reason}")
        return rejected

    def _split(self, progress: _Progress, part: list[Line]) -> None:
        if len(part) == 1:
            line = part[0]
            progress.refused[line.number] = DocumentTooLarge(
                f"a document of {len(line.content):,} bytes is larger than the search server accepts"
            )
            return
        # the server has a lower limit than the definition: later requests are smaller at once
        self._size = max(1, min(self._size, sum(len(line.content) for line in part) // 2))
        progress.again.extendleft(reversed(list(self._divided(part))))

    def _divided(self, lines: Iterable[Line]) -> Iterator[list[Line]]:
        """Divide lines into parts of at most `size` bytes; a larger line is a part of its own."""
        part, filled = list[Line](), 0
        for line in lines:
            if part and filled + len(line.content) > self._size:
                yield part
                part, filled = [], 0
            part.append(line)
            filled += len(line.content)
        if part:
            yield part

    def _send_again(self, progress: _Progress, lines: list[Line], body: Mapping[str, Any]) -> None:
        now = time.monotonic()
        progress.last_reason = error_reason(body) or progress.last_reason
        progress.failing_since = progress.failing_since or now
        if now - progress.failing_since > self._retry_for:
            raise SinkUnavailable(
                f"the search server accepted nothing for {self._retry_for:g} s: {progress.last_reason}"
            )
        progress.failures += 1
        self._calm, self._limit = 0, max(1, self._limit // 2)
        asked = body.get("retry_after")
        pause = PAUSES.seconds(progress.failures) if asked is None else float(asked)
        spread = 1 + random.random() / 4  # noqa: S311 - spreads attempts, guards nothing
        progress.resume_at = max(progress.resume_at, now + pause * spread)
        progress.again.appendleft(lines)

    def _continue(self, progress: _Progress) -> None:
        progress.failures, progress.failing_since = 0, None
        self._calm += 1
        if self._calm >= CALM and self._limit < self._requests:
            self._calm, self._limit = 0, self._limit + 1


def refusal(outcome: Mapping[str, Any]) -> CdcError:
    """Return the error of a document that the server refuses, without values of the row."""
    reason = error_reason(outcome)
    for beginning in _PREVIEW:
        reason = reason.partition(beginning)[0]
    kind = DocumentTooLarge if outcome["status"] == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else DocumentRefused
    return kind(f"the search server refuses a document: {reason}")
