"""Routes about rows that sinks have parked, as `cdc dlq`; the rows themselves are shown on the command line alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import Field

from cdc.catalog import DeadLetter
from cdc.catalog.dead_letter_requests import (
    DeadLetterAction,
    DeadLetterRequest,
    find_dead_letters,
    request_action,
    to_json,
)
from cdc.service.api.copies import ACCEPTED, EmptyBody, PipelineApi, PipelinePath, RequestBody, Text, actor_of

LetterPath = Annotated[str, Path(description="Its name.", min_length=1, max_length=40)]


class RetryBody(RequestBody):
    """Which rows to offer to their targets once more."""

    ids: Annotated[list[Text], Field(max_length=10_000)] | None = None
    """Their names; null is every one of the pipeline."""


class DiscardBody(RequestBody):
    """Why a row is to be forgotten."""

    reason: Text
    """Kept in the audit."""


@dataclass(frozen=True, slots=True)
class DeadLetterLine:
    """One key that a sink could not bring to its latest state."""

    id: str
    sink: str
    table: str
    key: list[str]
    """As Postgres text."""
    position: str
    ordinal: int
    """Of the latest change of the key."""
    code: str
    message: str
    first_at: str
    """When the key was first parked, ISO 8601."""


@dataclass(frozen=True, slots=True)
class RequestedDeadLetters:
    """What was asked of the apply process, which does it with its next batch."""

    commands: list[int]
    """Their numbers, one for each sink."""
    ids: list[str]


def dead_letter_routes(api: PipelineApi) -> APIRouter:
    """Every route of this module."""
    routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["dead letters"])

    @routes.get("/dlq")
    def letters(pipeline: PipelinePath) -> list[DeadLetterLine]:
        """What is parked, oldest change first (`cdc dlq ls`)."""
        api.check_pipeline(pipeline)
        return [_to_line(letter) for letter in api.catalog.dead_letters.ls(pipeline)]

    @routes.get("/dlq/{letter}")
    def letter_of(pipeline: PipelinePath, letter: LetterPath) -> DeadLetterLine:
        """One of them."""
        api.check_pipeline(pipeline)
        return _to_line(find_dead_letters(api.catalog, pipeline, [letter])[0])

    @routes.post("/dlq/retry", status_code=ACCEPTED)
    def retry(pipeline: PipelinePath, body: RetryBody, request: Request) -> RequestedDeadLetters:
        """Offer rows to their targets once more (`cdc dlq retry`)."""
        api.check_pipeline(pipeline)
        known = api.catalog.dead_letters.ls(pipeline)
        wanted = known if body.ids is None else find_dead_letters(api.catalog, pipeline, body.ids)
        return _post_request(api, wanted, DeadLetterRequest(DeadLetterAction.RETRY, actor_of(request)))

    @routes.post("/dlq/{letter}/retry", status_code=ACCEPTED)
    def retry_one(
        pipeline: PipelinePath, letter: LetterPath, _body: EmptyBody, request: Request
    ) -> RequestedDeadLetters:
        """Offer one row to its target once more (`cdc dlq retry`)."""
        api.check_pipeline(pipeline)
        return _post_request(
            api,
            find_dead_letters(api.catalog, pipeline, [letter]),
            DeadLetterRequest(DeadLetterAction.RETRY, actor_of(request)),
        )

    @routes.post("/dlq/{letter}/discard", status_code=ACCEPTED)
    def discard(
        pipeline: PipelinePath, letter: LetterPath, body: DiscardBody, request: Request
    ) -> RequestedDeadLetters:
        """Forget a row (`cdc dlq discard`): the target keeps what it has of the key, and verify reports it."""
        api.check_pipeline(pipeline)
        wanted = DeadLetterRequest(DeadLetterAction.DISCARD, actor_of(request), body.reason)
        return _post_request(api, find_dead_letters(api.catalog, pipeline, [letter]), wanted)

    return routes


def _post_request(api: PipelineApi, letters: list[DeadLetter], request: DeadLetterRequest) -> RequestedDeadLetters:
    posted = request_action(api.catalog, api.definition.name, letters, request)
    return RequestedDeadLetters(posted, [letter.id for letter in letters])


def _to_line(letter: DeadLetter) -> DeadLetterLine:
    fields: dict[str, Any] = to_json(letter)
    return DeadLetterLine(**fields)
