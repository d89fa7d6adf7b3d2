"""Long: processes and servers that are killed at random moments, again and again, lose no event of a delivery."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Final

import pytest

from tests.delivery.destinations.receivers import Receiver, killable, module_of
from tests.delivery.destinations.sending import Assignment, deliver, numbered, start_process
from tests.delivery.destinations.test_destination_contract import check_delivered

KINDS: Final = sorted({"amqp", "mqtt", "nats", "pubsub", "redis"} & set(killable()))
KILLS: Final = 50
ENDLESS: Final = 10_000_000
"""More events than the processes can send before they are killed."""


@pytest.fixture(name="receiver", params=KINDS)
def _receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with module_of(request.param).killable(request) as made:
        yield made


def sent_by_now(receiver: Receiver, given: Assignment) -> int:
    """Number of events up to the stored progress."""
    destination = receiver.make()
    stored = destination.open()
    destination.close()
    return int(stored or given.progress.read_bytes())


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_random_kills_lose_nothing(receiver: Receiver, tmp_path: Path) -> None:
    assert receiver.server is not None
    numbers, pause = random.Random(1), Event()
    killed: Counter[str] = Counter()
    given = Assignment(receiver.make, receiver.topics, ENDLESS, 20, tmp_path / "progress")
    for _ in range(KILLS):
        process = start_process(given, tmp_path / "log")
        pause.wait(numbers.uniform(0.3, 2.0))
        if numbers.random() < 0.3:
            receiver.server.kill()
            killed["server"] += 1
            pause.wait(numbers.uniform(0, 0.5))
            receiver.server.start()
            pause.wait(numbers.uniform(0, 0.5))
        process.kill()
        process.wait(60)
        killed["process"] += 1
    number = sent_by_now(receiver, given) + 100
    deliver(replace(given, events=number))
    got = [one.id for one in receiver.received()]
    sys.stderr.write(f"\nkills {dict(killed)}, events {len(set(got)):,}, duplicates {len(got) - len(set(got)):,}\n")

    missing = sorted({one.id for one in numbered(range(number), receiver.topics)} - set(got))
    assert not missing, f"{len(missing):,} of {number:,} events are missing, for example {missing[:3]}"
    check_delivered(receiver, numbered(range(number), receiver.topics), again=True)
