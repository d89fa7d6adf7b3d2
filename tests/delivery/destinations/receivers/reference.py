"""A destination that is as simple as the contract allows: one file, written again by each commit.

The tests of the contract run with it, too, so that a mistake in a test shows without a server.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import pytest

from cdc import failpoint
from cdc.delivery.destinations.contract import Event, EventsRefused, Promise
from cdc.errors import DeliveryFenced, EventTooLarge
from tests.delivery.destinations.receivers import Received, Receiver

CRASH_POINTS: Final = ("reference_written", "reference_committed")
LARGEST: Final = 2 << 20


class ReferenceDestination:
    """Stores the events, the progress and the number of the process that may commit in one file."""

    promise: ClassVar[Promise] = Promise.EXACTLY_ONCE
    stores_progress: ClassVar[bool] = True

    def __init__(self, file: Path) -> None:
        self._file = file
        self._epoch = 0
        self._batch: list[Event] = []

    def open(self) -> bytes | None:
        epoch, progress, events = stored(self._file)
        self._epoch, self._batch = epoch + 1, []
        self._store(progress, events)
        return progress

    def send(self, events: Sequence[Event]) -> None:
        large = [event for event in events if len(event.value or b"") > LARGEST]
        if large:
            raise EventsRefused({event.id: EventTooLarge(f"event {event.id!r} is too large") for event in large})
        self._batch += events

    def commit(self, progress: bytes) -> None:
        epoch, _, events = stored(self._file)
        if epoch != self._epoch:
            raise DeliveryFenced("another process opened the file")
        self._store(progress, [*events, *self._batch])
        self._batch = []

    def close(self) -> None:
        self._batch = []

    def _store(self, progress: bytes | None, events: list[Event]) -> None:
        partial_file = self._file.with_suffix(".partial")
        partial_file.write_bytes(pickle.dumps((self._epoch, progress, events)))
        failpoint.hit("reference_written")
        partial_file.rename(self._file)
        failpoint.hit("reference_committed")


def stored(file: Path) -> tuple[int, bytes | None, list[Event]]:
    """Number of the process, progress and events."""
    return pickle.loads(file.read_bytes()) if file.exists() else (0, None, [])


def received(file: Path) -> list[Received]:
    return [Received(event.id, event.topic, event.key, event.value, event.headers) for event in stored(file)[2]]


def forget_progress(file: Path) -> None:
    epoch, _, events = stored(file)
    file.write_bytes(pickle.dumps((epoch, None, events)))


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    file = request.getfixturevalue("tmp_path") / "reference"
    yield Receiver(
        partial(ReferenceDestination, file),
        partial(received, file),
        ("shop.orders", 'S."ödd" / table?\n'),
        too_large=LARGEST + 1,
        forget_progress=partial(forget_progress, file),
    )
