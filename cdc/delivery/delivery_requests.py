"""Answers requests of people to one delivery: pause, resume, rewind, and retry or discard of dead letters."""

from __future__ import annotations

from threading import Event
from typing import Final

import structlog

from cdc.catalog import Catalog, Command
from cdc.catalog.dead_letter_requests import DLQ, DeadLetterAction, DeadLetterOutcome
from cdc.catalog.delivery_requests import DELIVERY_PAUSES, REWIND_DELIVERY
from cdc.delivery.delivery_figures import dead_letter
from cdc.delivery.delivery_loop import DeliveryLoop
from cdc.errors import CdcError, Reaction
from cdc.failpoint import hit
from cdc.position import Position

KINDS: Final = (DELIVERY_PAUSES.kind, REWIND_DELIVERY, DLQ)
"""Kinds of commands that are requests to a delivery."""
STOPPED_EVERY: Final = 1.0
"""Seconds between two looks for requests while a delivery has stopped because of an error."""

log = structlog.get_logger("deliver")


class DeliveryRequests:
    """The requests to one delivery. If the catalog is unreachable, the next call of `answer` tries again."""

    def __init__(self, catalog: Catalog, pipeline: str, delivery: str) -> None:
        self._catalog = catalog
        self._pipeline = pipeline
        self._delivery = delivery
        self.is_paused = False

    def answer(self, loop: DeliveryLoop) -> None:
        """Look for requests and answer them. Raises an error with Reaction.RETRY if the destination is not available,
        and what `check_stored` raises unless there is a rewind; the other requests then stay pending.
        """
        try:
            pending = self._pending()
        except CdcError as exc:
            self._log_unreachable(exc)
            return
        self.is_paused = any(command.kind == DELIVERY_PAUSES.kind for command in pending)
        for command in pending:
            if command.kind == REWIND_DELIVERY:
                # the number alone is not unique: a new catalog begins again with 1
                request = f"{command.id} of {command.posted_at.isoformat()}"
                loop.rewind(Position.parse(command.payload["position"]), request)
                hit("delivery_rewound")
                self._catalog.commands.finish(command.id, {})
        loop.check_stored()  # without its progress, the delivery does not know its dead letters
        for command in pending:
            if command.kind == DLQ:
                self._catalog.commands.finish(command.id, {"letters": self._handle_letters(loop, command)})

    def await_any(self, stop: Event) -> bool:
        """Wait until there is a request that was not there before; return False if `stop` is set first."""
        seen: set[int] | None = None
        while not stop.wait(0.0 if seen is None else STOPPED_EVERY):
            try:
                pending = {command.id for command in self._pending()}
            except CdcError as exc:
                self._log_unreachable(exc)
                continue
            seen = pending if seen is None else seen & pending
            if pending - seen:
                return True
        return False

    def _pending(self) -> list[Command]:
        """Return the pending requests to this delivery, oldest first."""
        commands = self._catalog.commands.pending(self._pipeline, *KINDS)
        return [
            command
            for command in commands
            if command.payload["sink" if command.kind == DLQ else "delivery"] == self._delivery
        ]

    def _log_unreachable(self, exc: CdcError) -> None:
        log.warning(
            "cannot look for requests in the catalog; they stay pending",
            delivery=self._delivery,
            code=exc.code,
            message=exc.message,
        )

    def pause_notice(self) -> str | None:
        """Return why the delivery sends nothing at present; None if nobody has paused it."""
        return f"paused: run 'cdc deliveries resume {self._delivery}'" if self.is_paused else None

    def _handle_letters(self, loop: DeliveryLoop, command: Command) -> dict[str, str]:
        action = DeadLetterAction(command.payload["verb"])
        parked = {dead_letter(self._delivery, key).id: key for key in loop.progress.parked.values()}
        outcomes: dict[str, str] = {}
        for name in command.payload["ids"]:
            letter = parked.get(name)
            if letter is None:
                outcomes[name] = DeadLetterOutcome.GONE.value
            elif action is DeadLetterAction.DISCARD:
                loop.discard(letter)
                outcomes[name] = DeadLetterOutcome.DISCARDED.value
            else:
                try:
                    loop.retry(letter)
                    outcomes[name] = DeadLetterOutcome.APPLIED.value
                except CdcError as exc:
                    if exc.reaction is Reaction.RETRY:
                        raise
                    outcomes[name] = DeadLetterOutcome.PARKED.value
        return outcomes
