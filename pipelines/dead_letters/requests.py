"""Requests about parked rows: processes commands that retry or discard parked rows of a sink, and requests backfills.

Users send these commands through the catalog. This module itself requests a backfill for each incomplete parked row.
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
from cdc.snapshot.backfill_documents import KEYS, BackfillRequest
from cdc.snapshot.reader_commands import request_keys
from cdc.table import exact_glob
from cdc.targets.dead_letter_rows import Key, ParkedRow
from pipelines.dead_letters.quarantine import Quarantine, RowKey
from pipelines.runtime.sink_status_reporter import SinkFigures

PROCESS_EVERY: Final = 0.5
"""Seconds between two searches for new commands in the catalog."""
AGAIN_AFTER: Final = 60.0
"""Seconds after which a backfill is requested again if its rows are still incomplete: the backfill may have failed."""
_BUSY_FOR: Final = 5.0
"""Seconds after which a refused request for a backfill is repeated; another running backfill is one cause."""

log = structlog.get_logger("apply")


@dataclass(slots=True)
class _RowRequest:
    keys: frozenset[Key]
    retry_at: float
    job: int | None = None


class DeadLetterCommands:
    """Processes the commands that retry or discard parked rows of one sink, and requests backfills of incomplete rows.

    If the catalog is unreachable, the next call of `process` tries again.
    """

    def __init__(
        self,
        definition: Definition,
        catalog: Catalog,
        progress: SinkFigures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._definition = definition
        self._catalog = catalog
        self._progress = progress
        self._clock = clock
        self._sink = progress.sink
        self._due = 0.0
        self._open: dict[int, dict[str, RowKey | None]] = {}
        """Id of an open command → id of a dead letter → (relation, key) of its row; None if the row is not parked."""
        self._row_requests: dict[str, _RowRequest] = {}
        """Topic → requested backfill of incomplete rows."""

    def process(self, quarantine: Quarantine) -> None:
        """Report the parked rows, start and answer commands, and request backfills of incomplete rows.

        Does this at most once per PROCESS_EVERY seconds; other calls do nothing.
        """
        if self._clock() < self._due:
            return
        self._due = self._clock() + PROCESS_EVERY
        self._progress.record_dead_letters(tuple(to_dead_letter(self._sink, row) for row in quarantine.rows))
        try:
            self._start_commands(quarantine)
            self._answer_commands(quarantine)
            self._request_backfills(quarantine.rows)
        except CdcError as exc:
            log.warning(
                "cannot process commands about parked rows; the commands stay pending",
                sink=self._sink,
                code=exc.code,
                reason=exc.message,
            )

    def _start_commands(self, quarantine: Quarantine) -> None:
        for command in self._catalog.commands.pending(self._definition.name, DLQ):
            if command.id in self._open or command.payload["sink"] != self._sink:
                continue
            keys = {to_dead_letter(self._sink, row).id: (row.relation, row.key) for row in quarantine.rows}
            self._open[command.id] = {name: keys.get(name) for name in command.payload["ids"]}
            action = DeadLetterAction(command.payload["verb"])
            for key in filter(None, self._open[command.id].values()):
                quarantine.request(key, action)
            if action is DeadLetterAction.RETRY:  # incomplete rows are requested at once
                self._row_requests = {topic: one for topic, one in self._row_requests.items() if one.job is not None}

    def _answer_commands(self, quarantine: Quarantine) -> None:
        for command, letters in list(self._open.items()):
            found = {
                name: DeadLetterOutcome.GONE if key is None else quarantine.outcome(key)
                for name, key in letters.items()
            }
            if None not in found.values():
                self._catalog.commands.finish(command, {"letters": found})
                del self._open[command]

    def _request_backfills(self, rows: Iterable[ParkedRow]) -> None:
        wanted: dict[str, list[Key]] = {}
        for row in rows:
            if not row.complete:
                wanted.setdefault(row.topic, []).append(row.key)
        for topic, keys in wanted.items():
            self._request_backfill(topic, keys[:KEYS])
        self._row_requests = {topic: one for topic, one in self._row_requests.items() if topic in wanted}

    def _request_backfill(self, topic: str, keys: list[Key]) -> None:
        now, last = self._clock(), self._row_requests.get(topic)
        if last is not None and now < last.retry_at and (last.job is None or last.keys.issuperset(keys)):
            return
        if last is not None and last.job is not None:
            command = self._catalog.commands.get(last.job)
            if command is not None and command.state is CommandState.PENDING:
                return
        request = BackfillRequest((exact_glob(topic),), sink=self._sink, keys=tuple(keys))
        try:
            job = request_keys(self._definition, self._catalog, request, "apply").id
        except CdcError as exc:
            # another backfill of the table is running, which may read the rows as well
            if not isinstance(exc, StateConflict):
                log.warning(
                    "cannot request a backfill of incomplete parked rows; they stay parked until a later attempt",
                    sink=self._sink,
                    table=topic,
                    code=exc.code,
                    reason=exc.message,
                )
            self._row_requests[topic] = _RowRequest(frozenset(), now + _BUSY_FOR)
            return
        self._row_requests[topic] = _RowRequest(frozenset(keys), now + AGAIN_AFTER, job)
        log.info(
            "requested a backfill of incomplete parked rows",
            sink=self._sink,
            table=topic,
            keys=len(keys),
            backfill=job,
        )


def to_dead_letter(sink: str, row: ParkedRow) -> DeadLetter:
    """Convert a parked row to the form that the catalog shows."""
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
