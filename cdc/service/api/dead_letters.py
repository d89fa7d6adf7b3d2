"""Routes about rows that sinks have parked, as `cdc dlq`; the rows themselves are shown on the command line alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import Field

from cdc.catalog import DeadLetter
from cdc.catalog.dead_letter_requests import DeadLetterAction, DeadLetterRequest, letters_of, say, to_json
from cdc.service.api.copies import ACCEPTED, BackfillRequestBody, CopyRoutes, PipelinePath, Text, VerbBody, actor_of

LetterPath = Annotated[str, Path(description="Its name.", min_length=1, max_length=40)]


class RetryBody(BackfillRequestBody):
    """Which rows to offer to their targets once more."""

    ids: Annotated[list[Text], Field(max_length=10_000)] | None = None
    """Their names; null is every one of the pipeline."""


class DiscardBody(BackfillRequestBody):
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


def dead_letter_routes(desk: CopyRoutes) -> APIRouter:
    """Every route of this module."""
    routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["dead letters"])

    @routes.get("/dlq")
    def letters(pipeline: PipelinePath) -> list[DeadLetterLine]:
        """What is parked, oldest change first (`cdc dlq ls`)."""
        desk.check(pipeline)
        return [_shown(letter) for letter in desk.catalog.dead_letters.ls(pipeline)]

    @routes.get("/dlq/{letter}")
    def letter_of(pipeline: PipelinePath, letter: LetterPath) -> DeadLetterLine:
        """One of them."""
        desk.check(pipeline)
        return _shown(letters_of(desk.catalog, pipeline, [letter])[0])

    @routes.post("/dlq/retry", status_code=ACCEPTED)
    def retry(pipeline: PipelinePath, asked: RetryBody, request: Request) -> RequestedDeadLetters:
        """Offer rows to their targets once more (`cdc dlq retry`)."""
        desk.check(pipeline)
        known = desk.catalog.dead_letters.ls(pipeline)
        wanted = known if asked.ids is None else letters_of(desk.catalog, pipeline, asked.ids)
        return _asked(desk, wanted, DeadLetterRequest(DeadLetterAction.RETRY, actor_of(request)))

    @routes.post("/dlq/{letter}/retry", status_code=ACCEPTED)
    def retry_one(
        pipeline: PipelinePath, letter: LetterPath, _asked_for: VerbBody, request: Request
    ) -> RequestedDeadLetters:
        """Offer one row to its target once more (`cdc dlq retry`)."""
        desk.check(pipeline)
        return _asked(
            desk,
            letters_of(desk.catalog, pipeline, [letter]),
            DeadLetterRequest(DeadLetterAction.RETRY, actor_of(request)),
        )

    @routes.post("/dlq/{letter}/discard", status_code=ACCEPTED)
    def discard(
        pipeline: PipelinePath, letter: LetterPath, asked: DiscardBody, request: Request
    ) -> RequestedDeadLetters:
        """Forget a row (`cdc dlq discard`): the target keeps what it has of the key, and verify reports it."""
        desk.check(pipeline)
        wish = DeadLetterRequest(DeadLetterAction.DISCARD, actor_of(request), asked.reason)
        return _asked(desk, letters_of(desk.catalog, pipeline, [letter]), wish)

    return routes


def _asked(desk: CopyRoutes, letters: list[DeadLetter], wish: DeadLetterRequest) -> RequestedDeadLetters:
    posted = say(desk.catalog, desk.definition.name, letters, wish)
    return RequestedDeadLetters(posted, [letter.id for letter in letters])


def _shown(letter: DeadLetter) -> DeadLetterLine:
    fields: dict[str, Any] = to_json(letter)
    return DeadLetterLine(**fields)
