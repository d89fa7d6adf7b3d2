"""Pauses: a replay asks the running driver to let go of one sink while it puts a new target in place.

Two leases and one command. The `replay` lease keeps a second replay of the sink out. While the `pause` lease is
held no driver opens the sink, so one that starts meanwhile stays out too; the `pause` command asks a driver that has
it open to finish its batch and close it. The leases of a replay that dies run out; on its own machine they count for
nothing at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Event, Thread
from typing import Final

from cdc.catalog import Catalog, ProcessReport
from cdc.errors import CdcError, SinkInUse
from pipelines.runtime.sink_lease import LEASE, holder, is_dead

PAUSE: Final = "pause"
SILENT_AFTER: Final = 10.0
"""Seconds without a report after which a driver counts as gone; it reports twice a second."""
PATIENCE: Final = 300.0
"""Seconds for the driver to finish the batch it is in; the largest take tens of seconds."""
_POLL: Final = 0.1


class ReplayPauses:
    """The driver's side: which sinks are not to be open now; a catalog that is away pauses nothing."""

    def __init__(self, catalog: Catalog, pipeline: str) -> None:
        self._catalog, self._pipeline = catalog, pipeline

    def held(self, sink: str) -> bool:
        """Whether a replay holds the sink."""
        try:
            found = self._catalog.leases.holder(_pause_lease(self._pipeline, sink))
        except CdcError:
            return False
        return found is not None and not is_dead(found)

    def grant(self, sink: str) -> None:
        """The sink is closed: say so to who asked."""
        for command in self._catalog.commands.pending(self._pipeline, PAUSE):
            if command.payload["sink"] == sink:
                self._catalog.commands.finish(command.id, {})


def driver_of(catalog: Catalog, pipeline: str) -> ProcessReport | None:
    """The apply process, if it runs as far as anybody can tell."""
    seen = next((p for p in catalog.processes.ls(pipeline) if p.process == "apply"), None)
    if seen is None or seen.reported_at is None or seen.state == "stopped":
        return None
    return seen if (datetime.now(UTC) - seen.reported_at).total_seconds() <= SILENT_AFTER else None


@contextmanager
def sole_replay(catalog: Catalog, pipeline: str, sink: str) -> Iterator[None]:
    """Be the one replay of the sink inside the block; raises SinkInUse while another runs."""
    with leased(catalog, f"replay {pipeline}/{sink}", f"another replay of sink {sink!r} is running"):
        yield


@contextmanager
def paused(catalog: Catalog, pipeline: str, sink: str, patience: float = PATIENCE) -> Iterator[None]:
    """No driver has the sink open inside the block; raises SinkInUse when it does not let go in `patience` seconds."""
    with leased(catalog, _pause_lease(pipeline, sink), f"sink {sink!r} is paused by another process"):
        command = catalog.commands.post(pipeline, PAUSE, {"sink": sink})
        try:
            _wait(catalog, pipeline, sink, command, time.monotonic() + patience)
            yield
        finally:
            catalog.commands.finish(command, {"reason": "abandoned"}, ok=False)  # one that is finished stays as it is


def _pause_lease(pipeline: str, sink: str) -> str:
    return f"pause {pipeline}/{sink}"


def _wait(catalog: Catalog, pipeline: str, sink: str, command: int, deadline: float) -> None:
    while driver_of(catalog, pipeline) is not None:
        found = catalog.commands.get(command)
        if found is not None and found.result is not None:
            return
        if time.monotonic() >= deadline:
            raise SinkInUse(f"the running apply process does not let go of sink {sink!r}")
        time.sleep(_POLL)


@contextmanager
def leased(catalog: Catalog, name: str, taken: str) -> Iterator[None]:
    """Hold the lease inside the block; raises SinkInUse with the message `taken` while another holds it."""
    mine, done = holder(), Event()
    before = catalog.leases.holder(name)
    if before is not None and is_dead(before):
        catalog.leases.release(name, before)
    if not catalog.leases.acquire(name, mine, LEASE):
        raise SinkInUse(taken, remedy="wait for it to end; if it died, its hold runs out after some seconds")
    renewing = Thread(target=_renew, args=(catalog, name, mine, done), daemon=True)
    renewing.start()
    try:
        yield
    finally:
        done.set()
        renewing.join()
        catalog.leases.release(name, mine)


def _renew(catalog: Catalog, name: str, mine: str, done: Event) -> None:
    while not done.wait(LEASE / 3):
        try:
            catalog.leases.acquire(name, mine, LEASE)
        except CdcError:
            continue  # a catalog that is away for longer lets a driver in, and its publish is fenced
