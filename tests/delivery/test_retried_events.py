"""Events of a parked key, as a retry of its dead letter reads them; test_delivery_loop.py has the retries."""

from __future__ import annotations

from pathlib import Path
from random import Random

from cdc.delivery.progress import Progress
from cdc.position import Position
from tests.delivery.sent_log import begin_log, commit_in_groups, random_transactions
from tests.delivery.test_event_source import events_of, run_over, windows


def test_events_of_a_key_are_those_from_the_refused_one_on_and_reading_ahead_does_not_disturb_them(tmp_path: Path):
    random = Random(6)
    commit_in_groups(begin_log(tmp_path), random_transactions(random, 20, 40, most=6), random)
    run = run_over(tmp_path, batch=4)
    found = windows(run)
    first = next(part for window in found for part in window.parts if part.encoded.events)
    letter, topic, key = first.encoded.letters(0), first.encoded.events[0].topic, first.encoded.events[0].key

    upto = Progress(log_id=run.log.log_id, position=Position(300))
    for _ in range(5):
        next(found)  # the next window is being read while the events of the key are
        own = [event for events in run.source.events_of_key(letter, upto) for event in events]

    expected = [
        event
        for event in events_of(run_over(tmp_path))
        if (event.topic, event.key) == (topic, key) and letter.first <= (event.position, event.ordinal) < (301, 0)
    ]
    assert own == expected
    assert len(own) > 5
