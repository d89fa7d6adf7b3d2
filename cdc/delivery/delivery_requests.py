"""Answers requests of people to one delivery: pause, resume, rewind, and retry or discard of dead letters."""

from __future__ import annotations

import structlog

from cdc.catalog import Catalog, Command
from cdc.catalog.dead_letter_requests import DLQ, DeadLetterAction, DeadLetterOutcome
from cdc.catalog.delivery_requests import REWIND_DELIVERY, pause_of
from cdc.delivery.delivery_figures import dead_letter
from cdc.delivery.delivery_loop import DeliveryLoop
from cdc.errors import CdcError, Reaction
from cdc.position import Position

log = structlog.get_logger("deliver")


class DeliveryRequests:
    """The requests to one delivery. If the catalog is unreachable, the next call of `answer` tries again."""

    def __init__(self, catalog: Catalog, pipeline: str, delivery: str) -> None:
        self._catalog, self._pipeline, self._delivery = catalog, pipeline, delivery
        self.is_paused = False

    def answer(self, loop: DeliveryLoop) -> None:
        """Look for requests and answer them. Raises an error with Reaction.RETRY if the destination is not available;
        the request then stays pending.
        """
        try:
            self.is_paused = pause_of(self._catalog, self._pipeline, self._delivery) is not None
            letters = self._catalog.commands.pending(self._pipeline, DLQ)
            rewinds = self._catalog.commands.pending(self._pipeline, REWIND_DELIVERY)
        except CdcError as exc:
            log.warning(
                "cannot look for requests in the catalog; they stay pending",
                delivery=self._delivery,
                code=exc.code,
                message=exc.message,
            )
            return
        for command in rewinds:
            if command.payload["delivery"] == self._delivery:
                loop.rewind(Position.parse(command.payload["position"]))
                self._catalog.commands.finish(command.id, {})
        for command in letters:
            if command.payload["sink"] == self._delivery:
                self._catalog.commands.finish(command.id, {"letters": self._handle_letters(loop, command)})

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
