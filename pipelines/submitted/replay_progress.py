"""Told: a replay that was submitted, as the catalog has it: a command that says how far it is, and what came of it.

Nobody sees what a driver prints on a cluster, nor that it died: the command is there from the first moment, and the
lease that its payload names lasts as long as the driver, so that one without is known to have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from cdc.catalog import Catalog
from cdc.catalog.commands import JOB_LEASE, REPLAY
from cdc.config import Definition
from cdc.errors import CdcError, SinkError
from pipelines.replaying.outcome import ReplayReport
from pipelines.replaying.replay import ReportLine, replay
from pipelines.replaying.request import ReplayOptions
from pipelines.runtime.replay_pause import leased
from pipelines.runtime.sink_lease import holder


def replay_with_progress(definition: Definition, options: ReplayOptions, say: ReportLine) -> ReplayReport:
    """replay(), which is told to the catalog as well."""
    with (
        Catalog.open(definition.catalog.url) as catalog,
        _post_replay_command(catalog, definition.name, options) as told,
    ):

        def both(text: str) -> None:
            say(text)
            told.say(text)

        report = replay(definition, options, both, at_once=True)
        error = None if report.ok else SinkError(report.summary).to_json()
        told.outcome = {"ok": report.ok, "summary": report.summary, "result": report.to_json(), "error": error}
    return report


class _ReplayCommand:
    """One command that is being carried out."""

    def __init__(self, catalog: Catalog, number: int) -> None:
        self._catalog, self._number = catalog, number
        self.outcome: dict[str, Any] = {}

    def say(self, text: str) -> None:
        """How far it has come; a catalog that is away for a moment misses a line."""
        with suppress(CdcError):
            self._catalog.commands.record(self._number, {"summary": text})

    def end(self) -> None:
        """What came of it; without a word in a catalog that is away, its lease runs out."""
        with suppress(CdcError):
            self._catalog.commands.finish(self._number, self.outcome, ok=self.outcome["ok"])


@contextmanager
def _post_replay_command(catalog: Catalog, pipeline: str, options: ReplayOptions) -> Iterator[_ReplayCommand]:
    lease = f"replay {pipeline} by {holder()}"
    with leased(catalog, lease, f"{lease} runs already"):
        told = _ReplayCommand(catalog, catalog.commands.post(pipeline, REPLAY, {**asdict(options), JOB_LEASE: lease}))
        try:
            yield told
        except CdcError as error:
            told.outcome = _failed_outcome(error)
            raise
        except BaseException as error:
            told.outcome = _failed_outcome(CdcError(f"ended by {type(error).__name__}"))
            raise
        finally:
            told.end()


def _failed_outcome(error: CdcError) -> dict[str, Any]:
    return {"ok": False, "summary": error.message, "result": None, "error": error.to_json()}
