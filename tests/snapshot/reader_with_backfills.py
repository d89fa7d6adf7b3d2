"""A reader with its backfill worker, in threads of the test, for one captured database."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from types import TracebackType
from typing import Any, Final, Self

import pyarrow.compute as pc

from cdc.catalog import Catalog
from cdc.catalog.commands import Command
from cdc.log_row import Operation
from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest
from cdc.snapshot.backfill_worker import BackfillWorker
from cdc.snapshot.debezium_signals import Signals
from cdc.snapshot.watermark_window import WatermarkWindows
from tests.faults.capture import Captured, Reading, rows_with
from tests.fixtures.waiting import until

EVERY: Final = 0.15
"""Seconds between two questions."""


class Running(Reading):
    """Context manager that runs a reader and its backfill worker during the block."""

    def __init__(self, held: Captured, windows: WatermarkWindows | None = None) -> None:
        """windows: a subclass that acts in every window."""
        definition = held.definition
        signals = Signals(definition)
        super().__init__(held, windows, signals.queue)
        self.jobs = BackfillWorker(definition, self.context.link, signals, self.figures, lambda: held.definition)
        self.catalog = Catalog.open(definition.catalog.url)

    def __enter__(self) -> Self:
        super().__enter__()
        self.jobs.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop.set()
        self.jobs.join()
        self.catalog.close()
        super().__exit__(kind, error, trace)

    def until(self, condition: Callable[[], Any], what: str = "what was waited for") -> Any:
        """As a Reading does, but less often: the worker looks once a second, and each question costs milliseconds."""

        def asked() -> Any:
            if self._failures:
                raise self._failures[0]
            return condition()

        return until(asked, what, every=EVERY)

    def ask(self, request: BackfillRequest) -> int:
        return self.catalog.commands.post("held", BACKFILL, request.to_json())

    def ended(self, job: int) -> Command:
        """The command once it is finished."""
        return self.until(lambda: (c := self.catalog.commands.get(job)) and c.state != "pending" and c)

    def state(self, job: int) -> str | None:
        """As the catalog shows it."""
        command = self.catalog.commands.get(job)
        return None if command is None or command.result is None else command.result["state"]


def read_rows(held: Captured) -> list[dict[str, Any]]:
    """Every `r` row of the log, in its order."""
    found = rows_with(held.log, pc.field("op") == Operation.READ.value)
    return sorted(found, key=itemgetter("position", "ordinal"))
