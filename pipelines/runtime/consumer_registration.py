"""Registered: how a sink tells the log how far it has come, so that nothing it has not read is trimmed.

Its word lies beside the log and outlives the process; only a person takes it back (`cdc consumers forget`).
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
from cdc.log.consumers import Consumer
from cdc.log.object_path import Root, as_root
from cdc.log.reader import LogReader
from cdc.position import Position

MOVED_EVERY: Final = 5.0
"""Seconds between two words of a sink that moves: each is a file that is synced."""
ALIVE_EVERY: Final = 30.0
"""Seconds between two words of one that stands still: who is silent for minutes counts as gone."""
REPLAY: Final = ".replay"
"""Ends the name of what a replay registers."""

log = structlog.get_logger("apply")


class ConsumerRegistration:
    """One target's word; saying it never fails, for a sink does not stop because of it."""

    def __init__(
        self, root: str | Root, log_id: str, wanted: DeltaSinkDefinition | SearchSinkDefinition, suffix: str = ""
    ) -> None:
        self._root, self._name = as_root(root), wanted.name + suffix
        self.uuid = target_uuid(log_id, wanted, suffix)
        self._said: tuple[Position, int | None] | None = None
        self._said_at = 0.0

    def say(self, position: Position, pinned: int | None = None, *, at_once: bool = False) -> None:
        """Everything up to position is in the target for good; pinned: the version of `compacted` that it reads.

        Written when it is time for it, or at once.
        """
        moved, age = self._said != (position, pinned), time.monotonic() - self._said_at
        if self._said is not None and not at_once and age < (MOVED_EVERY if moved else ALIVE_EVERY):
            return
        self._said, self._said_at = (position, pinned), time.monotonic()
        now = BootTimestamp.now()
        said = Consumer(self.uuid, self._name, position, pinned, now.clock_us, now.boot, now.up_us)
        try:
            consumers.register(self._root, said)
        except (OSError, CdcError) as exc:
            log.warning("consumer is not registered", consumer=self._name, message=str(exc))

    def forget(self) -> None:
        """Take the word back."""
        try:
            consumers.forget(self._root, self.uuid)
        except OSError as exc:
            log.warning("consumer is not forgotten", consumer=self._name, message=str(exc))


def target_uuid(log_id: str, wanted: DeltaSinkDefinition | SearchSinkDefinition, suffix: str = "") -> str:
    """The same for ever for one target of one log: a target is known by the place it lies at, not by its name."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"cdc:{log_id}/{wanted.type}/{wanted.path}{suffix}"))


def pinned_in(view: LogReader, after: Position) -> int | None:
    """The version of `compacted` that a range from `after` on is read from; None where it needs single changes only."""
    return view.compacted.version if view.compacted is not None and after < view.oldest else None


@contextmanager
def held_for_replay(
    root: str | Root, view: LogReader, wanted: DeltaSinkDefinition | SearchSinkDefinition
) -> Iterator[None]:
    """Inside the block nothing that the view reads from its beginning on is trimmed, or leaves the disk.

    A replay that dies leaves its word behind; the next one of the same target says it anew and takes it back.
    """
    registered, done = ConsumerRegistration(root, view.log_id, wanted, REPLAY), Event()
    horizon = Position(0) if view.compacted is None else view.compacted.horizon
    pinned = pinned_in(view, Position(0))

    def keep_saying() -> None:
        while not done.wait(ALIVE_EVERY):
            registered.say(horizon, pinned)

    registered.say(horizon, pinned, at_once=True)
    saying = Thread(target=keep_saying, name="consumer", daemon=True)
    saying.start()
    try:
        yield
    finally:
        done.set()
        saying.join()
        registered.forget()
