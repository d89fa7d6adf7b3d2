"""Requests to retry or discard dead letters, from the command line and the API.

A request is stored as a command. The running apply process executes the command with its next batch, and stores the
outcome as the result of the command.
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
"""Kind of a command that retries or discards dead letters.

Its payload has the keys "sink", "verb" and "ids". Its result is {"letters": id → DeadLetterOutcome}.
"""
ANSWER_WITHIN: Final = 15.0
"""Seconds to wait for the outcome of a request.

The apply process executes requests with its next batch. Each heartbeat, by default every 10 seconds, causes a batch.
"""
_POLL_INTERVAL: Final = 0.1
_MAX_LISTED: Final = 10
"""Number of dead letters that an error message lists."""


class DeadLetterAction(StrEnum):
    """Action that a person can request for dead letters."""

    #: Try again to write the row to the target.
    RETRY = "retry"
    #: Remove the dead letter; the target keeps its old row of the key.
    DISCARD = "discard"


class DeadLetterOutcome(StrEnum):
    """The result of a request for one dead letter."""

    #: The target has the row, or a later change of the key.
    APPLIED = "applied"
    #: The target refused the row again.
    PARKED = "parked"
    #: The row has a partial image, so a backfill was requested to read the whole row from the source.
    ASKED = "asked"
    #: The dead letter was removed.
    DISCARDED = "discarded"
    #: The key was no longer parked.
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class DeadLetterRequest:
    """An action on dead letters, requested by an actor."""

    verb: DeadLetterAction
    actor: str
    reason: str | None = None
    """Reason of the request, which is written to the audit log."""


def find_dead_letters(catalog: Catalog, pipeline: str, ids: Iterable[str]) -> list[DeadLetter]:
    """Return the dead letters with these ids; a unique prefix of an id is enough.

    Raises UnknownName if no dead letter, or more than one, has an id with this prefix.
    """
    known = catalog.dead_letters.ls(pipeline)
    return [_find(known, one) for one in ids]


def request_action(
    catalog: Catalog, pipeline: str, letters: Iterable[DeadLetter], request: DeadLetterRequest
) -> list[int]:
    """Store one command per sink for the apply process, and return the numbers of the commands."""
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
    """Wait at most `patience` seconds for the commands; return the known outcomes by id of dead letter."""
    deadline = time.monotonic() + patience
    never = Event()
    outcomes = dict[str, str]()
    for number in commands:
        while (command := catalog.commands.get(number)) is not None and command.state is CommandState.PENDING:
            if time.monotonic() >= deadline:
                return outcomes
            never.wait(_POLL_INTERVAL)
        outcomes |= (command.result or {}).get("letters", {}) if command is not None else {}
    return outcomes


def to_json(letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter as the JSON object that commands and API show."""
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


def _find(known: list[DeadLetter], text: str) -> DeadLetter:
    found = [letter for letter in known if letter.id.startswith(text)] if text else []
    if len(found) == 1:
        return found[0]
    if not found:
        listed = ", ".join(letter.id for letter in known[:_MAX_LISTED]) or "none"
        raise UnknownName(
            f"there is no dead letter with the id {text!r}",
            remedy=f"run 'cdc dlq ls' and write an id from its output; first ids: {listed}",
        )
    raise UnknownName(
        f"the ids of {len(found)} dead letters begin with {text!r}", remedy="write more characters of the id"
    )
