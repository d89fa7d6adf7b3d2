"""Requests to retry or discard dead letters, from the command line, the page and the API.

Nothing is changed here: the running apply process does what is asked, with its next batch, and answers the command.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from threading import Event
from typing import Any, Final

from cdc.catalog import Catalog, CommandState, DeadLetter
from cdc.errors import UnknownName
from cdc.position import Position

DLQ: Final = "dlq"
"""The kind of command; its payload is {"sink", "verb", "ids"}, its result {"letters": id → Outcome}."""
ANSWER_WITHIN: Final = 15.0
"""Seconds to wait for an answer: with the source's next heartbeat there is a batch, by default every 10 seconds."""
_ASK_EVERY: Final = 0.1
_LISTED: Final = 10


class DeadLetterAction(StrEnum):
    """What can be asked for parked keys."""

    #: Offer the row to the target once more.
    RETRY = "retry"
    #: Forget it; the target keeps what it has of the key.
    DISCARD = "discard"


class DeadLetterOutcome(StrEnum):
    """What became of it."""

    #: The target has it, or what came later of the key.
    APPLIED = "applied"
    #: It was refused once more.
    PARKED = "parked"
    #: Its row is not whole: the source is asked for it.
    ASKED = "asked"
    #: It was forgotten.
    DISCARDED = "discarded"
    #: It was not parked any more.
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class DeadLetterRequest:
    """What somebody wants done with letters."""

    verb: DeadLetterAction
    actor: str
    reason: str | None = None
    """Kept in the audit."""


def find_dead_letters(catalog: Catalog, pipeline: str, ids: Iterable[str]) -> list[DeadLetter]:
    """The letters of these names, or of beginnings of them that no other letter has; raises UnknownName."""
    known = catalog.dead_letters.ls(pipeline)
    return [_named(known, one) for one in ids]


def request_action(
    catalog: Catalog, pipeline: str, letters: Iterable[DeadLetter], request: DeadLetterRequest
) -> list[int]:
    """Ask the apply process; hands back the commands' numbers, one for each sink."""
    by_sink: dict[str, list[DeadLetter]] = {}
    for letter in letters:
        by_sink.setdefault(letter.sink, []).append(letter)
    posted = []
    for sink, of_sink in by_sink.items():
        ids = [letter.id for letter in of_sink]
        posted.append(catalog.commands.post(pipeline, DLQ, {"sink": sink, "verb": request.verb.value, "ids": ids}))
        detail = {"sink": sink, "ids": ids, "tables": sorted({letter.topic for letter in of_sink})}
        reason = {} if request.reason is None else {"reason": request.reason}
        catalog.audit.write(request.actor, f"dlq {request.verb.value}", pipeline, detail | reason)
    return posted


def await_outcomes(catalog: Catalog, commands: Iterable[int], patience: float = ANSWER_WITHIN) -> dict[str, str]:
    """What became of letters, by name, as far as that is known after so many seconds."""
    deadline, never, outcomes = time.monotonic() + patience, Event(), dict[str, str]()
    for number in commands:
        while (command := catalog.commands.get(number)) is not None and command.state is CommandState.PENDING:
            if time.monotonic() >= deadline:
                return outcomes
            never.wait(_ASK_EVERY)
        outcomes |= (command.result or {}).get("letters", {}) if command is not None else {}
    return outcomes


def to_json(letter: DeadLetter) -> dict[str, Any]:
    """As commands and the API tell it."""
    return {
        "id": letter.id,
        "sink": letter.sink,
        "table": letter.topic,
        "key": list(letter.key),
        "position": str(Position(letter.position)),
        "ordinal": letter.ordinal,
        "code": letter.code,
        "message": letter.message,
        "first_at": letter.added_at.isoformat(),
    }


def _named(known: list[DeadLetter], text: str) -> DeadLetter:
    found = [letter for letter in known if letter.id.startswith(text)] if text else []
    if len(found) == 1:
        return found[0]
    if not found:
        listed = ", ".join(letter.id for letter in known[:_LISTED]) or "none"
        raise UnknownName(f"no dead letter is called {text!r}", remedy=f"there are: {listed}; see 'cdc dlq ls'")
    raise UnknownName(f"{len(found)} dead letters begin with {text!r}", remedy="write more characters of the id")
