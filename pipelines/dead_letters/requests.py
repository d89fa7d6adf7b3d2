"""Orders: what the apply process hears about parked keys of one sink through the catalog, and what it asks itself.

People ask for keys to be tried again or forgotten; the sink asks the source for rows of which it has only a part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from cdc.catalog import Catalog, CommandState, DeadLetter
from cdc.catalog.dead_letter_requests import DLQ, DeadLetterAction, DeadLetterOutcome
from cdc.config import Definition
from cdc.errors import CdcError, StateConflict
from cdc.snapshot.backfill_requests import request_keys
from cdc.snapshot.backfill_state import KEYS, BackfillRequest
from cdc.stores.dead_letter_rows import Key, ParkedRow
from cdc.table import exact_glob
from pipelines.dead_letters.quarantine import Place, Quarantine
from pipelines.runtime.progress import SinkFigures

LOOK_EVERY: Final = 0.5
"""Seconds."""
AGAIN_AFTER: Final = 60.0
"""Seconds after which a row is asked for once more that a backfill should have brought: it may have failed."""
_BUSY_FOR: Final = 5.0
"""Seconds until the next try while the table is in another backfill."""

log = structlog.get_logger("apply")


@dataclass(slots=True)
class _Asked:
    keys: frozenset[Key]
    again: float
    job: int | None = None


class DeadLetterCommands:
    """Looks at the catalog every now and then; one that is away is asked again."""

    def __init__(
        self,
        definition: Definition,
        catalog: Catalog,
        progress: SinkFigures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._definition, self._catalog, self._progress, self._clock = definition, catalog, progress, clock
        self._sink = progress.sink
        self._due = 0.0
        self._open: dict[int, dict[str, Place | None]] = {}
        """By command: the letters that it names; None is one that is not parked."""
        self._asked: dict[str, _Asked] = {}
        """By topic."""

    def look(self, parking: Quarantine) -> None:
        """Show what is parked, hand on what was asked, answer what is done, ask for rows that are not whole.

        At most twice a second.
        """
        if self._clock() < self._due:
            return
        self._due = self._clock() + LOOK_EVERY
        self._progress.parked(tuple(letter_of(self._sink, row) for row in parking.rows))
        try:
            self._hear(parking)
            self._answer(parking)
            self._ask(parking.rows)
        except CdcError as exc:
            log.warning("parked keys have to wait", sink=self._sink, code=exc.code, reason=exc.message)

    def _hear(self, parking: Quarantine) -> None:
        for command in self._catalog.commands.pending(self._definition.name, DLQ):
            if command.id in self._open or command.payload["sink"] != self._sink:
                continue
            places = {letter_of(self._sink, row).id: (row.relation, row.key) for row in parking.rows}
            self._open[command.id] = {name: places.get(name) for name in command.payload["ids"]}
            verb = DeadLetterAction(command.payload["verb"])
            for place in filter(None, self._open[command.id].values()):
                parking.ask(place, verb)
            if verb is DeadLetterAction.RETRY:  # what is not whole is asked for at once
                self._asked = {topic: one for topic, one in self._asked.items() if one.job is not None}

    def _answer(self, parking: Quarantine) -> None:
        for command, letters in list(self._open.items()):
            found = {
                name: DeadLetterOutcome.GONE if at is None else parking.outcome(at) for name, at in letters.items()
            }
            if None not in found.values():
                self._catalog.commands.finish(command, {"letters": found})
                del self._open[command]

    def _ask(self, rows: Iterable[ParkedRow]) -> None:
        wanted: dict[str, list[Key]] = {}
        for row in rows:
            if not row.complete:
                wanted.setdefault(row.topic, []).append(row.key)
        for topic, keys in wanted.items():
            self._ask_of(topic, keys[:KEYS])
        self._asked = {topic: one for topic, one in self._asked.items() if topic in wanted}

    def _ask_of(self, topic: str, keys: list[Key]) -> None:
        now, last = self._clock(), self._asked.get(topic)
        if last is not None and now < last.again and (last.job is None or last.keys.issuperset(keys)):
            return
        if last is not None and last.job is not None:
            command = self._catalog.commands.get(last.job)
            if command is not None and command.state is CommandState.PENDING:
                return
        request = BackfillRequest((exact_glob(topic),), sink=self._sink, keys=tuple(keys))
        try:
            job = request_keys(self._definition, self._catalog, request, "apply").id
        except CdcError as exc:
            # it is copied, or read again, already: that may bring the rows as well
            if not isinstance(exc, StateConflict):
                log.warning("rows cannot be asked for", sink=self._sink, table=topic, code=exc.code, reason=exc.message)
            self._asked[topic] = _Asked(frozenset(), now + _BUSY_FOR)
            return
        self._asked[topic] = _Asked(frozenset(keys), now + AGAIN_AFTER, job)
        log.info("rows asked of the source", sink=self._sink, table=topic, keys=len(keys), backfill=job)


def letter_of(sink: str, row: ParkedRow) -> DeadLetter:
    """A parked row as the catalog shows it."""
    return DeadLetter(
        sink=sink,
        topic=row.topic,
        key=row.key,
        position=row.position,
        ordinal=row.ordinal,
        code=row.code,
        message=row.message,
        added_at=datetime.fromtimestamp(row.first_at / 1e6, UTC),
    )
