"""Pauses: a running apply process closes one sink while a replay replaces the sink's target.

A pause consists of two leases and one command. The `replay` lease keeps a second replay of the sink out. While the
`pause` lease exists, no apply process opens the sink, not even a process that starts later. The `pause` command asks
the process that has the sink open to finish its batch and close it. The leases of a dead replay expire; on the machine
where the replay ran, they are void at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

from cdc.catalog import Catalog, ProcessReport
from cdc.catalog.process_lease import is_dead, leased
from cdc.errors import CdcError, SinkInUse

PAUSE: Final = "pause"
SILENT_AFTER: Final = 10.0
"""Seconds without a report after which an apply process counts as dead; a running one reports every second."""
CLOSE_TIMEOUT: Final = 300.0
"""Maximum seconds that a replay waits until the apply process has finished its batch and closed the sink."""
_POLL: Final = 0.1


class ReplayPauses:
    """The sinks that replays have paused. While the catalog is unreachable, no sink counts as paused."""

    def __init__(self, catalog: Catalog, pipeline: str) -> None:
        self._catalog, self._pipeline = catalog, pipeline

    def is_paused(self, sink: str) -> bool:
        """Return whether a replay that still runs has paused the sink."""
        try:
            holder = self._catalog.leases.holder(_pause_lease(self._pipeline, sink))
        except CdcError:
            return False
        return holder is not None and not is_dead(holder)

    def confirm(self, sink: str) -> None:
        """Confirm to the replay that the sink is closed."""
        for command in self._catalog.commands.pending(self._pipeline, PAUSE):
            if command.payload["sink"] == sink:
                self._catalog.commands.finish(command.id, {})


def driver_of(catalog: Catalog, pipeline: str) -> ProcessReport | None:
    """Return the last report of a running apply process.

    None if the process has never run, has stopped, or has not reported for SILENT_AFTER seconds.
    """
    seen = next((p for p in catalog.processes.ls(pipeline) if p.process == "apply"), None)
    if seen is None or seen.reported_at is None or seen.state == "stopped":
        return None
    return seen if (datetime.now(UTC) - seen.reported_at).total_seconds() <= SILENT_AFTER else None


@contextmanager
def paused(catalog: Catalog, pipeline: str, sink: str, timeout: float = CLOSE_TIMEOUT) -> Iterator[None]:
    """Pause the sink: inside the block, no apply process has the sink open.

    Raises SinkInUse if a running apply process does not close the sink within `timeout` seconds, or if another process
    has already paused the sink.
    """
    with leased(catalog, _pause_lease(pipeline, sink), f"sink {sink!r} is paused by another process"):
        command = catalog.commands.post(pipeline, PAUSE, {"sink": sink})
        try:
            _wait(catalog, pipeline, sink, command, time.monotonic() + timeout)
            yield
        finally:
            catalog.commands.finish(
                command, {"reason": "abandoned"}, ok=False
            )  # no effect on a command that was answered


def _pause_lease(pipeline: str, sink: str) -> str:
    return f"pause {pipeline}/{sink}"


def _wait(catalog: Catalog, pipeline: str, sink: str, command: int, deadline: float) -> None:
    while driver_of(catalog, pipeline) is not None:
        answer = catalog.commands.get(command)
        if answer is not None and answer.result is not None:
            return
        if time.monotonic() >= deadline:
            raise SinkInUse(
                f"timeout: the apply process did not close sink {sink!r}, so the replay did not replace its target"
            )
        time.sleep(_POLL)
