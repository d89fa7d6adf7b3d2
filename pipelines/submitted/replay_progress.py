"""A replay that runs on a cluster, recorded in the catalog as a command with its progress and its result.

The operator sees neither the output nor the death of a driver on a cluster. So the driver posts a command when it
starts. The payload of the command names a lease, which the driver renews. If this lease has expired, the replay of the
command has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from cdc.catalog import Catalog
from cdc.catalog.commands import JOB_LEASE, REPLAY
from cdc.catalog.process_lease import holder, leased
from cdc.config import Definition
from cdc.errors import CdcError, SinkError
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.replay import ReportLine, replay
from pipelines.replaying.report import ReplayReport


def replay_with_progress(definition: Definition, options: ReplayOptions, report_line: ReportLine) -> ReplayReport:
    """Run `replay`, and also record its progress and result in the catalog."""
    with (
        Catalog.open(definition.catalog.url) as catalog,
        _post_replay_command(catalog, definition.name, options) as command,
    ):

        def report_and_record(text: str) -> None:
            report_line(text)
            command.record_progress(text)

        report = replay(definition, options, report_and_record, at_once=True)
        error = None if report.ok else SinkError(report.summary).to_json()
        command.result = {"ok": report.ok, "summary": report.summary, "result": report.to_json(), "error": error}
    return report


class _ReplayCommand:
    """The catalog command of a replay that is running."""

    def __init__(self, catalog: Catalog, number: int) -> None:
        self._catalog, self._number = catalog, number
        self.result: dict[str, Any] = {}

    def record_progress(self, text: str) -> None:
        """Record a line of progress in the command. If the catalog cannot be reached, the line is lost."""
        with suppress(CdcError):
            self._catalog.commands.record(self._number, {"summary": text})

    def finish(self) -> None:
        """Record the result of the replay. If the catalog cannot be reached, only the expired lease shows the end."""
        with suppress(CdcError):
            self._catalog.commands.finish(self._number, self.result, ok=self.result["ok"])


@contextmanager
def _post_replay_command(catalog: Catalog, pipeline: str, options: ReplayOptions) -> Iterator[_ReplayCommand]:
    lease = f"replay {pipeline} by {holder()}"
    with leased(catalog, lease, f"another process has lease {lease!r}"):
        command = _ReplayCommand(
            catalog, catalog.commands.post(pipeline, REPLAY, {**asdict(options), JOB_LEASE: lease})
        )
        try:
            yield command
        except CdcError as error:
            command.result = _failed_result(error)
            raise
        except BaseException as error:
            command.result = _failed_result(
                CdcError(f"the replay of sink {options.sink!r} ended with {type(error).__name__}")
            )
            raise
        finally:
            command.finish()


def _failed_result(error: CdcError) -> dict[str, Any]:
    return {"ok": False, "summary": error.message, "result": None, "error": error.to_json()}
