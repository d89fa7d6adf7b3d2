"""Routes about rows that sinks have parked, as `cdc dlq`; the rows themselves are shown on the command line alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import Field

from cdc.catalog import DeadLetter
from cdc.catalog.dead_letter_requests import Verb, Wish, letters_of, say, to_json
from cdc.service.api.copies import ACCEPTED, Asking, Desk, PipelinePath, Text, VerbBody, actor_of

LetterPath = Annotated[str, Path(description="Its name.", min_length=1, max_length=40)]


class RetryBody(Asking):
    """Which rows to offer to their targets once more."""

    ids: Annotated[list[Text], Field(max_length=10_000)] | None = None
    """Their names; null is every one of the pipeline."""


class DiscardBody(Asking):
    """Why a row is to be forgotten."""

    reason: Text
    """Kept in the audit."""


@dataclass(frozen=True, slots=True)
class Letter:
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
class AskedLetters:
    """What was asked of the apply process, which does it with its next batch."""

    commands: list[int]
    """Their numbers, one for each sink."""
    ids: list[str]


def dead_letter_routes(desk: Desk) -> APIRouter:
    """Every route of this module."""
    routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["dead letters"])

    @routes.get("/dlq")
    def letters(pipeline: PipelinePath) -> list[Letter]:
        """What is parked, oldest change first (`cdc dlq ls`)."""
        desk.check(pipeline)
        return [_shown(letter) for letter in desk.catalog.dead_letters.ls(pipeline)]

    @routes.get("/dlq/{letter}")
    def letter_of(pipeline: PipelinePath, letter: LetterPath) -> Letter:
        """One of them."""
        desk.check(pipeline)
        return _shown(letters_of(desk.catalog, pipeline, [letter])[0])

    @routes.post("/dlq/retry", status_code=ACCEPTED)
    def retry(pipeline: PipelinePath, asked: RetryBody, request: Request) -> AskedLetters:
        """Offer rows to their targets once more (`cdc dlq retry`)."""
        desk.check(pipeline)
        known = desk.catalog.dead_letters.ls(pipeline)
        wanted = known if asked.ids is None else letters_of(desk.catalog, pipeline, asked.ids)
        return _asked(desk, wanted, Wish(Verb.RETRY, actor_of(request)))

    @routes.post("/dlq/{letter}/retry", status_code=ACCEPTED)
    def retry_one(pipeline: PipelinePath, letter: LetterPath, _asked_for: VerbBody, request: Request) -> AskedLetters:
        """Offer one row to its target once more (`cdc dlq retry`)."""
        desk.check(pipeline)
        return _asked(desk, letters_of(desk.catalog, pipeline, [letter]), Wish(Verb.RETRY, actor_of(request)))

    @routes.post("/dlq/{letter}/discard", status_code=ACCEPTED)
    def discard(pipeline: PipelinePath, letter: LetterPath, asked: DiscardBody, request: Request) -> AskedLetters:
        """Forget a row (`cdc dlq discard`): the target keeps what it has of the key, and verify reports it."""
        desk.check(pipeline)
        wish = Wish(Verb.DISCARD, actor_of(request), asked.reason)
        return _asked(desk, letters_of(desk.catalog, pipeline, [letter]), wish)

    return routes


def _asked(desk: Desk, letters: list[DeadLetter], wish: Wish) -> AskedLetters:
    posted = say(desk.catalog, desk.definition.name, letters, wish)
    return AskedLetters(posted, [letter.id for letter in letters])


def _shown(letter: DeadLetter) -> Letter:
    fields: dict[str, Any] = to_json(letter)
    return Letter(**fields)
