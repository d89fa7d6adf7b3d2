"""Sends numbered events as the delivery loop does: in this process, or in one that a test kills at a failpoint.

`python -m tests.delivery.destinations.sending FILE`: FILE has a pickled Assignment.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from cdc import failpoint
from cdc.delivery.destinations.contract import ID_HEADER, POSITION_HEADER, XID_HEADER, Destination, Event
from cdc.delivery.destinations.event_columns import EventColumns, EventFields
from cdc.errors import CdcError, DeliveryFenced, Reaction
from tests.fixtures import forked

KEYS: Final = 5
LOG: Final = "0123456789abcdef"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one process has to send."""

    make: Callable[[], Destination]
    topics: tuple[str, ...]
    events: int
    batch: int
    progress: Path
    """File for the progress of a destination that does not store it."""
    pause: float = 0.0
    """Seconds between two batches."""


def event(number: int, topic: str, key: bytes | None, value: bytes | None, *headers: tuple[str, bytes]) -> Event:
    """An event with the headers that every event has, and others before them."""
    name = f"{LOG}/{number}/0"
    own = ((ID_HEADER, name.encode()), (POSITION_HEADER, b"%d" % number), (XID_HEADER, b"700"))
    return Event(name, number, 0, topic, key, value, (*headers, *own))


def numbered(numbers: range, topics: Sequence[str]) -> list[Event]:
    """Events of a few keys in each topic."""
    return [
        event(number, topics[number % len(topics)], b"key %d" % (number // len(topics) % KEYS), b"value %d" % number)
        for number in numbers
    ]


def as_columns(events: Sequence[Event]) -> EventColumns:
    """Events of `numbered` in the form in which the delivery loop sends them."""
    topics = sorted({one.topic for one in events})
    numbers = [one.position for one in events]
    return EventColumns(
        EventFields(
            ids=pa.array([one.id for one in events], pa.string()),
            positions=np.array(numbers, np.int64),
            ordinals=np.zeros(len(events), np.int64),
            topics=topics,
            topic_numbers=np.array([topics.index(one.topic) for one in events], np.int64),
            keys=pa.array([one.key for one in events], pa.binary()),
            values=pa.array([one.value for one in events], pa.binary()),
            transactions=np.arange(len(events)),
            position_texts=pa.array([b"%d" % number for number in numbers], pa.binary()),
            xid_texts=pa.array([b"700"] * len(events), pa.binary()),
        )
    )


def deliver(assignment: Assignment) -> None:
    """Send what is left, after an error that may be temporary from the last progress on."""
    destination = assignment.make()
    while True:
        try:
            _deliver_rest(destination, assignment)
        except CdcError as error:
            print(repr(error), flush=True)
            destination.close()
            # a supervisor starts a process again that was fenced
            if error.reaction is not Reaction.RETRY and not isinstance(error, DeliveryFenced):
                raise
        else:
            destination.close()
            return


def _deliver_rest(destination: Destination, assignment: Assignment) -> None:
    stored = destination.open()
    if not destination.stores_progress:
        stored = assignment.progress.read_bytes() if assignment.progress.exists() else None
    print(f"progress {stored!r}", flush=True)
    for first in range(int(stored or 0), assignment.events, assignment.batch):
        after = min(first + assignment.batch, assignment.events)
        events = numbered(range(first, after), assignment.topics)
        half = len(events) // 2
        destination.send(as_columns(events[:half]))
        failpoint.hit("batch_half_sent")
        destination.send(as_columns(events[half:]))
        failpoint.hit("batch_sent")
        destination.commit(b"%d" % after)
        failpoint.hit("batch_committed")
        if not destination.stores_progress:
            partial = assignment.progress.with_suffix(".partial")
            partial.write_bytes(b"%d" % after)
            partial.rename(assignment.progress)
        threading.Event().wait(assignment.pause)


def run_process(assignment: Assignment, point: str | None = None) -> int:
    """Exit status of a process that sends what is left and is killed at a failpoint, such as `batch_sent:2`."""
    file = _written(assignment)
    environment = {failpoint.VARIABLE: point} if point else {}
    ended = forked.run(__name__, file, environment=environment, timeout=120)
    assert ended.status in {0, -9}, ended.output + ended.errors
    return ended.status


def start_process(assignment: Assignment, log: Path) -> forked.Forked:
    """A process that sends what is left."""
    with log.open("ab") as output:
        return forked.start(__name__, _written(assignment), output=output)


def _written(assignment: Assignment) -> Path:
    file = assignment.progress.with_name("assignment")
    file.write_bytes(pickle.dumps(assignment))
    return file


if __name__ == "__main__":
    deliver(pickle.loads(Path(sys.argv[1]).read_bytes()))
