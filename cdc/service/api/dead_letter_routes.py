"""Routes that list, retry and discard dead letters, as `cdc dlq` does.

The routes return the key of a parked row, but no other values; `cdc dlq show` prints all values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import Field

from cdc.catalog import DeadLetter
from cdc.catalog.dead_letter_requests import (
    DeadLetterAction,
    DeadLetterRequest,
    find_dead_letters,
    request_action,
    to_json,
)
from cdc.service.api.route_context import ACCEPTED, Actor, Context, EmptyBody, RequestBody, RouteContext, Text
from cdc.service.defined_pipeline import DefinedPipeline

LetterPath = Annotated[str, Path(description="Id of the dead letter.", min_length=1, max_length=40)]


class RetryBody(RequestBody):
    """Body of a request to retry dead letters."""

    ids: Annotated[list[Text], Field(max_length=10_000)] | None = None
    """Ids of the dead letters to retry; null means all dead letters of the pipeline."""


class DiscardBody(RequestBody):
    """Body of a request to discard a dead letter."""

    reason: Text
    """Why the dead letter is discarded; the reason is written to the audit log."""


@dataclass(frozen=True, slots=True)
class DeadLetterLine:
    """One dead letter: a key, and why the target refused the latest row of this key."""

    id: str
    sink: str
    table: str
    key: list[str]
    """Values of the key columns as Postgres text."""
    position: str
    ordinal: int
    """Ordinal of the latest change of the key."""
    code: str
    message: str
    first_at: str
    """Time when the key was first parked, ISO 8601."""


@dataclass(frozen=True, slots=True)
class RequestedDeadLetters:
    """Accepted commands to retry or discard dead letters; the apply process executes them with its next batch."""

    commands: list[int]
    """Numbers of the commands, one for each sink."""
    ids: list[str]
    """Ids of the dead letters."""


routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["dead letters"])
"""The routes about dead letters."""


@routes.get("/dlq")
def letters(context: Context) -> list[DeadLetterLine]:
    """Return every dead letter of the pipeline, oldest change first (`cdc dlq ls`)."""
    return [_to_line(letter) for letter in _dead_letters(context)]


@routes.get("/dlq/{letter}")
def letter_of(context: Context, letter: LetterPath) -> DeadLetterLine:
    """Return one dead letter."""
    return _to_line(find_dead_letters(context.catalog, context.name, [letter])[0])


@routes.post("/dlq/retry", status_code=ACCEPTED)
def retry(context: Context, body: RetryBody, actor: Actor) -> RequestedDeadLetters:
    """Ask the apply process to merge the rows of dead letters again (`cdc dlq retry`)."""
    known = _dead_letters(context)
    wanted = known if body.ids is None else find_dead_letters(context.catalog, context.name, body.ids)
    return _post_request(context, wanted, DeadLetterRequest(DeadLetterAction.RETRY, actor))


@routes.post("/dlq/{letter}/retry", status_code=ACCEPTED)
def retry_one(context: Context, letter: LetterPath, _body: EmptyBody, actor: Actor) -> RequestedDeadLetters:
    """Ask the apply process to merge the row of one dead letter again (`cdc dlq retry`)."""
    return _post_request(
        context,
        find_dead_letters(context.catalog, context.name, [letter]),
        DeadLetterRequest(DeadLetterAction.RETRY, actor),
    )


@routes.post("/dlq/{letter}/discard", status_code=ACCEPTED)
def discard(context: Context, letter: LetterPath, body: DiscardBody, actor: Actor) -> RequestedDeadLetters:
    """Discard one dead letter (`cdc dlq discard`).

    The target keeps its old row for the key, and `cdc verify` then reports a mismatch.
    """
    wanted = DeadLetterRequest(DeadLetterAction.DISCARD, actor, body.reason)
    return _post_request(context, find_dead_letters(context.catalog, context.name, [letter]), wanted)


def _dead_letters(context: RouteContext) -> list[DeadLetter]:
    return DefinedPipeline.of(context.definition).dead_letters(context.catalog)


def _post_request(context: RouteContext, letters: list[DeadLetter], request: DeadLetterRequest) -> RequestedDeadLetters:
    posted = request_action(context.catalog, context.name, letters, request)
    return RequestedDeadLetters(posted, [letter.id for letter in letters])


def _to_line(letter: DeadLetter) -> DeadLetterLine:
    fields: dict[str, Any] = to_json(letter)
    return DeadLetterLine(**fields)
