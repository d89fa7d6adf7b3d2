"""The registration of a sink as a consumer of the log. Retention keeps the segments that a consumer has not read.

The registration is a file next to the log and survives the process. Only `cdc consumers forget` removes the
registration of a sink; a replay removes its own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Final

import structlog

from cdc.config import DeltaSinkDefinition, SearchSinkDefinition
from cdc.errors import CdcError
from cdc.log import consumers
from cdc.log.boot_clock import BootTimestamp
from cdc.log.bucket_files import Root, as_root
from cdc.log.consumers import Consumer
from cdc.log.reader import LogReader
from cdc.position import Position

MOVED_EVERY: Final = 5.0
"""Seconds between two reports of a sink whose position changes; each report writes and syncs a file."""
ALIVE_EVERY: Final = 30.0
"""Seconds between two reports of an idle sink; a consumer without a report for minutes counts as dead."""
REPLAY: Final = ".replay"
"""Suffix of the consumer name of a replay."""

log = structlog.get_logger("apply")


class ConsumerRegistration:
    """The registration of one sink as a consumer of the log. Errors are logged and do not stop the sink."""

    def __init__(
        self, root: str | Root, log_id: str, wanted: DeltaSinkDefinition | SearchSinkDefinition, suffix: str = ""
    ) -> None:
        self._root, self._name = as_root(root), wanted.name + suffix
        self.uuid = target_uuid(log_id, wanted, suffix)
        self._reported: tuple[Position, int | None] | None = None
        self._reported_at = 0.0

    def report(self, position: Position, pinned: int | None = None, *, at_once: bool = False) -> None:
        """Report that the sink has all changes up to `position`.

        pinned: the version of `compacted` that the sink reads; None if it reads no compacted rows. at_once: write the
        report even if neither MOVED_EVERY nor ALIVE_EVERY requires it yet.
        """
        moved, age = self._reported != (position, pinned), time.monotonic() - self._reported_at
        if self._reported is not None and not at_once and age < (MOVED_EVERY if moved else ALIVE_EVERY):
            return
        self._reported, self._reported_at = (position, pinned), time.monotonic()
        now = BootTimestamp.now()
        consumer = Consumer(self.uuid, self._name, position, pinned, now.clock_us, now.boot, now.up_us)
        try:
            consumers.register(self._root, consumer)
        except (OSError, CdcError) as exc:
            log.warning(
                "cannot register a consumer of the log; the consumer continues, and the registration is tried again",
                consumer=self._name,
                message=str(exc),
            )

    def unregister(self) -> None:
        """Remove the registration, so that retention no longer waits for this consumer."""
        try:
            consumers.forget(self._root, self.uuid)
        except OSError as exc:
            log.warning(
                "cannot remove a consumer of the log; run 'cdc consumers forget NAME'",
                consumer=self._name,
                message=str(exc),
            )


def target_uuid(log_id: str, wanted: DeltaSinkDefinition | SearchSinkDefinition, suffix: str = "") -> str:
    """Return the id of a sink as a consumer of a log. It depends on the sink's path and type, not on its name."""
    place = wanted.location if isinstance(wanted, SearchSinkDefinition) else wanted.path
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"cdc:{log_id}/{wanted.type}/{place}{suffix}"))


def pinned_in(view: LogReader, after: Position) -> int | None:
    """Return the version of `compacted` that a consumer at position `after` reads; None if it needs only `changes`."""
    return view.compacted.version if view.compacted is not None and after < view.oldest else None


@contextmanager
def registered_for_replay(
    root: str | Root, view: LogReader, wanted: DeltaSinkDefinition | SearchSinkDefinition
) -> Iterator[None]:
    """Register a replay as a consumer of the log: inside the block, retention removes no file that `view` reads.

    If the replay is killed, its registration remains. The next replay of the same sink replaces and removes it.
    """
    registered, done = ConsumerRegistration(root, view.log_id, wanted, REPLAY), Event()
    horizon = Position(0) if view.compacted is None else view.compacted.horizon
    pinned = pinned_in(view, Position(0))

    def report_regularly() -> None:
        while not done.wait(ALIVE_EVERY):
            registered.report(horizon, pinned)

    registered.report(horizon, pinned, at_once=True)
    reporting = Thread(target=report_regularly, name="consumer", daemon=True)
    reporting.start()
    try:
        yield
    finally:
        done.set()
        reporting.join()
        registered.unregister()
