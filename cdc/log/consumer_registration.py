"""The registration of a consumer of the log. Retention keeps the segments that a consumer has not read.

The registration is a file next to the log and survives the process. `cdc consumers forget` removes it.
"""

from __future__ import annotations

import time
from typing import Final

import structlog

from cdc.boot_clock import BootTimestamp
from cdc.bucket_files import Root, as_root
from cdc.errors import CdcError
from cdc.log import consumers
from cdc.log.consumers import Consumer
from cdc.position import Position

MOVED_EVERY: Final = 5.0
"""Seconds between two reports of a consumer whose position changes; each report writes and syncs a file."""
ALIVE_EVERY: Final = 30.0
"""Seconds between two reports of an idle consumer; one without a report for minutes counts as dead."""

log = structlog.get_logger("consumer")


class ConsumerRegistration:
    """The registration of one consumer of the log. Errors are logged and do not stop the consumer."""

    def __init__(self, root: str | Root, uuid: str, name: str) -> None:
        self._root, self._name = as_root(root), name
        self.uuid = uuid
        self._reported: tuple[Position, int | None] | None = None
        self._reported_at = 0.0

    def report(self, position: Position, pinned: int | None = None, *, at_once: bool = False) -> None:
        """Report that the consumer has all changes up to `position`.

        pinned: the version of `compacted` that the consumer reads; None if it reads no compacted rows. at_once: write
        the report even if neither MOVED_EVERY nor ALIVE_EVERY requires it yet.
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
