"""A reader with its jobs in threads of the test, over one captured database."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Any, Self

from cdc import metrics
from cdc.catalog import Catalog
from cdc.catalog.commands import Command
from cdc.change import Operation
from cdc.position import Position
from cdc.reader import Reader
from cdc.settings import reader_settings
from cdc.snapshot.jobs import BACKFILL, Jobs
from cdc.snapshot.placing import Placing
from cdc.snapshot.work import Request
from tests.faults.capture import Captured

PATIENCE = 90.0


class Running:
    """Stopped when it is left; a failure of the reader is one of the test."""

    def __init__(self, held: Captured) -> None:
        self.held, self.figures = held, metrics.Figures()
        self._stop, placing = Event(), Placing()
        definition = held.definition
        self._failures: list[BaseException] = []
        self._reader = Thread(target=self._read, args=(placing,))
        self._jobs = Jobs(definition, placing, self.figures, self._stop, lambda: held.definition)
        self.catalog = Catalog.open(definition.catalog.url)

    def __enter__(self) -> Self:
        self._reader.start()
        self._jobs.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._reader.join()
        self._jobs.join()
        self.catalog.close()
        assert not self._failures

    def _read(self, placing: Placing) -> None:
        try:
            Reader(reader_settings(self.held.definition), self.figures, self._stop, placing).run()
        except BaseException as exc:
            self._failures.append(exc)

    @property
    def reads(self) -> bool:
        """Whether the reader runs."""
        return self._reader.is_alive()

    def ask(self, request: Request) -> int:
        return self.catalog.commands.post("held", BACKFILL, request.to_json())

    def ended(self, job: int) -> Command:
        """The command once it is finished."""
        return self.until(lambda: (c := self.catalog.commands.get(job)) and c.state != "pending" and c)

    def state(self, job: int) -> str | None:
        """As the catalog shows it."""
        command = self.catalog.commands.get(job)
        return None if command is None or command.result is None else command.result["state"]

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline, never = time.monotonic() + PATIENCE, Event()
        while not (found := condition()):
            assert not self._failures, self._failures
            assert time.monotonic() < deadline
            never.wait(0.02)
        return found

    def caught_up(self) -> None:
        """Wait until the log holds everything that has committed by now."""
        end = self.held._wal_end()
        self.until(lambda: self.held._holds(end))


def read_rows(held: Captured) -> list[dict[str, Any]]:
    """Every `r` row of the log, in its order."""
    log = held.log
    return [
        row
        for batch in log.rows(Position(0), log.durable or Position(0))
        for row in batch.to_pylist()
        if row["op"] == Operation.READ.value
    ]
