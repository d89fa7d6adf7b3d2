"""The loop: order, dead letters, crashes at any point, rewinds, and what is never lost or doubled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from cdc.delivery.delivery_loop import KEY_ATTEMPTS
from cdc.delivery.destinations.contract import Event, EventsRefused
from cdc.delivery.progress import FOLDER, Progress, check_progress, delivery_uuid
from cdc.errors import (
    DeadLetterLimitExceeded,
    DeliveryFenced,
    DeliveryOfAnotherLog,
    DestinationUnavailable,
    EventNotEncodable,
    EventRefused,
    LogTrimmed,
    ProgressDamaged,
)
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.delivery.destinations.planned import PlannedDestination, nothing, planned
from tests.delivery.loop_run import NAME, LoopRun, drain, key_of, places_of, settings_of
from tests.delivery.plain_format import PlainFormat
from tests.delivery.sent_log import (
    SEGMENT_PER_COMMIT,
    begin_log,
    change,
    commit_in_groups,
    expected,
    random_log,
    random_transactions,
)
from tests.fixtures.examples import examples
from tests.log import simple_compaction
from tests.log.sample_log import ITEMS, ORDERS, commit_rows

QUIET = examples(6, suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = [
    pytest.param({}, id="stores progress"),
    pytest.param({"stores_progress": False}, id="progress next to the log"),
    pytest.param({"stores_progress": False, "others_acknowledged": True}, id="acknowledges the others"),
    pytest.param({"stores_progress": False, "others_acknowledged": True, "refuse_at_commit": True}, id="refuses late"),
    pytest.param({"refuse_at_commit": True}, id="stores progress and refuses late"),
    pytest.param({"collects": True}, id="collects windows"),
    pytest.param({"collects": True, "refuse_at_commit": True}, id="collects windows and refuses late"),
]


def refused_key(key: str, after: tuple[int, int] = (0, 0)) -> Any:
    """A plan that refuses the events of one key, beginning after a place."""
    return lambda event: key_of(event) == [key] and (event.position, event.ordinal) > after


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    return random_log(tmp_path / "log")


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_delivered_once_and_in_order(root: Path, kind: dict[str, bool]):
    destination = planned(**kind)

    with LoopRun(root, destination, batch=4) as loop:
        drain(loop)

    assert places_of(destination.delivered) == expected(root)


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_event_blocks_only_later_events_of_its_key(root: Path, kind: dict[str, bool]):
    destination = planned(**kind)
    destination.refused = refused_key("3", after=(60, 0))

    with LoopRun(root, destination, batch=7) as loop:
        drain(loop)
        parked = loop.progress.parked
        found = destination.delivered
        waiting = set(expected(root)) - set(places_of(found))
        assert len(found) == len(set(places_of(found)))
        assert {topic_of(root, place) for place in waiting} == {key.topic for key in parked.values()}
        firsts = {key.topic: key.first for key in parked.values()}
        for place in waiting:  # not one event before the refused one waits
            assert place >= firsts[topic_of(root, place)]
        for topic in firsts:
            assert by_key(found, topic, "3") == sorted(by_key(found, topic, "3"))

        destination.refused = nothing
        for letter in list(parked.values()):
            loop.retry(letter)
        drain(loop)

    assert sorted(places_of(destination.delivered)) == expected(root)
    for topic in firsts:
        assert by_key(destination.delivered, topic, "3") == sorted(by_key(destination.delivered, topic, "3"))
    assert not loop.progress.parked


def topic_of(root: Path, place: tuple[int, int]) -> str:
    """Topic of the change at a place."""
    log = LogReader(root)
    rows = (one for batch in log.rows(Position(0), log.durable or Position(0)) for one in batch.to_pylist())
    return next(f"shop.{one['topic']}" for one in rows if (one["position"], one["ordinal"]) == place)


def by_key(events: list[Event], topic: str, key: str) -> list[tuple[int, int]]:
    """Places of the events of one key."""
    return places_of([event for event in events if event.topic == topic and key_of(event) == [key]])


@QUIET
@given(seed=st.integers(0, 10**6), kind=st.sampled_from([param.values[0] for param in KINDS]))
def test_refusals_retries_and_failures_in_any_order_lose_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kind: dict[str, bool]
):
    random, root = Random(seed), tmp_path_factory.mktemp("log") / "log"
    commit_in_groups(begin_log(root), random_transactions(random, 20, 10, most=12), random)
    destination = planned(**kind)
    for _ in range(4):
        keys = {str(random.randint(1, 8)) for _ in range(random.randint(0, 2))}
        destination.refused = lambda event, keys=keys: key_of(event)[0] in keys  # type: ignore[misc]
        destination.fail_at_send = destination.sends + random.randint(1, 8) if random.random() < 0.5 else None
        with LoopRun(root, destination, batch=random.randint(1, 9)) as loop:
            live(loop, random)
    destination.refused, destination.fail_at_send = nothing, None
    with LoopRun(root, destination, batch=5) as loop:
        drain(loop)
        for letter in list(loop.progress.parked.values()):
            loop.retry(letter)
        assert not loop.progress.parked

    delivered = places_of(destination.delivered)
    if destination.stores_progress:
        assert sorted(delivered) == expected(root)
    assert set(delivered) == set(expected(root))
    first_seen: dict[str, tuple[tuple[str, list[str | None]], tuple[int, int]]] = {}
    for event in destination.delivered:
        first_seen.setdefault(event.id, ((event.topic, key_of(event)), (event.position, event.ordinal)))
    for key in {repr(key) for key, _ in first_seen.values()}:
        own = [place for one, place in first_seen.values() if repr(one) == key]
        assert own == sorted(own), f"order of {key}"


def live(loop: Any, random: Random) -> None:
    """Some steps and retries, until something fails."""
    try:
        for _ in range(random.randint(1, 20)):
            loop.step()
            if random.random() < 0.2 and loop.progress.parked:
                loop.retry(random.choice(list(loop.progress.parked.values())))
    except (DestinationUnavailable, EventRefused):
        return


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_inside_a_large_transaction_loses_neither_its_later_parts_nor_its_dead_letter(
    tmp_path: Path, kind: dict[str, bool]
):
    root = tmp_path / "log"
    commit_rows(begin_log(root), *(change(ORDERS, 20, n, str(n)) for n in range(40)))
    destination = planned(**kind)
    destination.refused = refused_key("13")

    with LoopRun(root, destination, batch=10) as loop:
        drain(loop)

    assert sorted(places_of(destination.delivered)) == [(20, n) for n in range(40) if n != 13]
    assert [key.key for key in loop.progress.parked.values()] == [("13",)]


@pytest.mark.parametrize("kind", KINDS)
def test_events_of_a_parked_key_before_the_refused_one_are_sent(tmp_path: Path, kind: dict[str, bool]):
    root = tmp_path / "log"
    writer = begin_log(root)
    for position in (20, 30, 40, 50):
        commit_rows(writer, change(ORDERS, position, 0, "1"), change(ORDERS, position, 1, "2"))
    destination = planned(**kind)
    destination.refused = lambda event: event.position == 40 and event.ordinal == 0

    with LoopRun(root, destination) as loop:
        drain(loop)
        assert by_key(destination.delivered, "shop.shop.orders", "1") == [(20, 0), (30, 0)]
        destination.refused = nothing
        (letter,) = loop.progress.parked.values()
        loop.retry(letter)

    assert by_key(destination.delivered, "shop.shop.orders", "1") == [(20, 0), (30, 0), (40, 0), (50, 0)]
    assert len(by_key(destination.delivered, "shop.shop.orders", "2")) == 4


def test_a_change_that_cannot_be_encoded_is_a_dead_letter_and_earlier_changes_of_its_key_are_sent(tmp_path: Path):
    root, encoding = tmp_path / "log", PlainFormat(frozenset({"30.0"}))
    writer = begin_log(root)
    commit_rows(writer, *(change(ORDERS, position, 0, "1") for position in (20, 30, 40)))
    destination = PlannedDestination()

    with LoopRun(root, destination, encoding) as loop:
        drain(loop)
        (letter,) = loop.progress.parked.values()
        assert places_of(destination.delivered) == [(20, 0)]
        with pytest.raises(Exception, match="refused"):
            loop.retry(letter)
        commit_rows(writer, change(ORDERS, 50, 0, "2"))
        drain(loop)
        assert places_of(destination.delivered) == [(20, 0), (50, 0)]  # nothing of the failed retry came later
        encoding.refused = frozenset()
        loop.retry(letter)

    assert places_of(destination.delivered) == [(20, 0), (50, 0), (30, 0), (40, 0)]


def test_a_retry_that_is_refused_again_sends_nothing(root: Path):
    destination = PlannedDestination()
    destination.refused = refused_key("3", after=(60, 0))
    with LoopRun(root, destination) as loop:
        drain(loop)
        before = list(destination.delivered)
        letter = next(iter(loop.progress.parked.values()))
        with pytest.raises(EventRefused):
            loop.retry(letter)
        assert destination.delivered == before
        assert letter.identity in loop.progress.parked


class NamelessDestination(PlannedDestination):
    """Refuses events without a name for them, from a point on."""

    names_none = False

    def send(self, events: Sequence[Event]) -> None:
        """Refuse everything after the switch."""
        self.sends += 1
        if self.names_none:
            raise EventsRefused({})
        self.sends -= 1
        super().send(events)


def test_a_retry_ends_if_the_destination_never_names_the_refused_event(root: Path):
    destination = NamelessDestination()
    destination.refused = refused_key("3", after=(60, 0))
    with LoopRun(root, destination) as loop:
        drain(loop)
        letter = next(iter(loop.progress.parked.values()))
        destination.names_none = True
        before = destination.sends
        with pytest.raises(DestinationUnavailable, match="does not say which"):
            loop.retry(letter)

    assert destination.sends - before == KEY_ATTEMPTS
    assert letter.identity in loop.progress.parked


def test_a_window_ends_with_an_error_if_the_destination_never_names_the_refused_event(root: Path):
    destination = NamelessDestination()
    destination.names_none = True
    with LoopRun(root, destination, batch=1) as loop, pytest.raises(DestinationUnavailable, match="does not say which"):
        drain(loop)

    assert destination.delivered == []


def test_a_discarded_key_continues_with_its_next_event(tmp_path: Path):
    root = tmp_path / "log"
    writer = begin_log(root)
    commit_rows(writer, *(change(ORDERS, position, 0, "1") for position in (20, 30)))
    destination = PlannedDestination()
    destination.refused = lambda event: event.position == 20
    with LoopRun(root, destination) as loop:
        drain(loop)
        (letter,) = loop.progress.parked.values()
        loop.discard(letter)
        commit_rows(writer, change(ORDERS, 40, 0, "1"))
        drain(loop)

    assert places_of(destination.delivered) == [(40, 0)]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_delivery_that_starts_at_latest_skips_nothing_that_came_after_its_first_start(
    root: Path, kind: dict[str, bool]
):
    destination = planned(**kind)
    with LoopRun(root, destination, start="latest") as loop:
        begin = loop.progress.position
    commit_rows(LogWriter(root, SEGMENT_PER_COMMIT), change(ORDERS, begin + 10, 0, "1"))

    with LoopRun(root, destination, start="latest") as loop:
        drain(loop)

    assert places_of(destination.delivered) == [(begin + 10, 0)]


def test_a_rewind_sends_the_same_ids_again_and_a_parked_key_still_waits(root: Path):
    destination = PlannedDestination()
    destination.refused = refused_key("3", after=(60, 0))
    with LoopRun(root, destination, batch=5) as loop:
        drain(loop)
        first = [event.id for event in destination.delivered]
        loop.rewind(Position(0))
        drain(loop)

    assert [event.id for event in destination.delivered] == first + first
    assert loop.progress.parked


def test_a_rewind_to_the_end_skips(root: Path):
    destination = PlannedDestination()
    with LoopRun(root, destination) as loop:
        loop.rewind(LogReader(root).durable or Position(0))
        drain(loop)

    assert destination.delivered == []


def test_a_rewind_while_a_window_was_read_ahead_uses_the_schema_in_force_there(root: Path):
    destination = PlannedDestination()
    with LoopRun(root, destination, batch=2) as loop:
        for _ in range(3):
            loop.step()
        loop.rewind(Position(0))
        drain(loop)

    assert places_of(destination.delivered)[-len(expected(root)) :] == expected(root)


def test_progress_of_rows_without_events_is_registered_only_when_it_is_stored(tmp_path: Path):
    root = tmp_path / "log"
    writer = begin_log(root)
    for position in (20, 30, 40):
        commit_rows(writer, change(ITEMS, position, 0, "1"))
    destination = PlannedDestination()

    with LoopRun(root, destination, tables=["shop.orders"]) as loop:
        drain(loop)
        assert loop.progress.position == 40
        assert destination.stored is not None
        assert Progress.from_json(destination.stored) == loop.stored


def test_more_dead_letters_than_the_limit_stop_the_delivery(root: Path):
    destination = PlannedDestination()
    destination.refused = lambda _event: True
    with LoopRun(root, destination, stop_at=2) as loop:
        drain(loop)
        with pytest.raises(DeadLetterLimitExceeded, match="but may have at most 2"):
            check_progress(loop.progress, loop.progress.log_id, settings_of(stop_at=2))


def test_progress_of_another_log_is_refused_until_a_rewind(root: Path):
    destination = PlannedDestination()
    destination.stored = Progress(log_id="another", position=Position(77)).to_json()
    with LoopRun(root, destination) as loop:
        with pytest.raises(DeliveryOfAnotherLog, match="another"):
            check_progress(loop.progress, LogReader(root).log_id, settings_of())
        loop.rewind(Position(0))
        check_progress(loop.progress, LogReader(root).log_id, settings_of())
        drain(loop)

    assert places_of(destination.delivered) == expected(root)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_damaged_progress_is_an_error_of_its_own_until_a_rewind(root: Path, kind: dict[str, bool]):
    destination = planned(**kind)
    run = LoopRun(root, destination)
    if destination.stores_progress:
        destination.stored = b"{}"
    else:
        (root / FOLDER).mkdir()
        (root / FOLDER / f"{delivery_uuid(run.log.log_id, NAME)}.json").write_text("{}")

    with run as loop:
        with pytest.raises(ProgressDamaged, match="of a delivery cannot be read"):
            loop.check_stored()
        assert destination.delivered == []
        loop.rewind(Position(0))
        loop.check_stored()
        drain(loop)

    assert places_of(destination.delivered) == expected(root)


def test_a_refused_gap_event_stops_the_delivery_instead_of_being_sent_for_ever(root: Path):
    destination = PlannedDestination()
    destination.refused = lambda event: event.id.endswith("/gap")
    with (
        LoopRun(root, destination, on_overload={"drop": {"older_than": "1s"}}) as loop,
        pytest.raises(EventRefused, match="gap"),
    ):
        drain(loop)


def test_a_process_that_another_one_has_overtaken_stores_no_progress(root: Path):
    old, new = (planned(stores_progress=False) for _ in range(2))
    with LoopRun(root, old, batch=3) as zombie:
        zombie.step()
        with LoopRun(root, new, batch=3) as loop:
            with pytest.raises(DeliveryFenced):
                zombie.step()
            drain(loop)

    assert set(places_of(old.delivered + new.delivered)) == set(expected(root))


def test_a_key_that_was_parked_while_the_compacted_state_was_sent_is_retried_with_its_state(tmp_path: Path):
    root = tmp_path / "log"
    writer = begin_log(root)
    commit_rows(writer, *(change(ORDERS, 20, n, str(n)) for n in range(4)))
    commit_rows(writer, change(ORDERS, 30, 0, "9"))
    compaction = simple_compaction.compact(root, 20)
    log = LogReader(root)
    writer.trim([one.segment for one in log.segments()[:-1]], Position(20))
    compaction.commit([], horizon=Position(20), floor=Position(20))
    destination = PlannedDestination()
    destination.refused = refused_key("2")

    with LoopRun(root, destination) as loop:
        drain(loop)
        (letter,) = loop.progress.parked.values()
        destination.refused = nothing
        loop.retry(letter)

    assert sorted(places_of(destination.delivered)) == [(20, 0), (20, 1), (20, 2), (20, 3), (30, 0)]


def test_a_position_below_the_trimmed_changes_is_an_error_that_names_the_rewind(tmp_path: Path):
    root = tmp_path / "log"
    writer = begin_log(root)
    commit_rows(writer, change(ORDERS, 20, 0, "1"))
    destination = PlannedDestination()
    with LoopRun(root, destination) as loop:
        drain(loop)
    for position in (30, 40, 50):
        commit_rows(writer, change(ORDERS, position, 0, "1"))
    simple_compaction.compact(root, 40)
    writer.trim([one.segment for one in LogReader(root).segments()[:-1]], Position(40))

    with LoopRun(root, destination) as loop:
        with pytest.raises(LogTrimmed) as raised:
            loop.step()
        loop.rewind(Position(0))
        drain(loop)

    assert "cdc deliveries rewind SINK" in raised.value.fix
    assert places_of(destination.delivered) == [(20, 0), (40, 0), (50, 0)]


def test_progress_names_the_oldest_position_that_a_dead_letter_needs(root: Path):
    destination = PlannedDestination()
    destination.refused = refused_key("3", after=(60, 0))
    with LoopRun(root, destination) as loop:
        drain(loop)
        first = min(key.first.position for key in loop.progress.parked.values())

    assert loop.progress.needed == first - 1
    assert replace(loop.progress, parked={}).needed == loop.progress.position


def test_two_changes_of_a_key_in_one_transaction_are_each_delivered_once_if_the_second_is_refused(tmp_path: Path):
    root = tmp_path / "log"
    commit_rows(begin_log(root), change(ORDERS, 20, 0, "1"), change(ORDERS, 20, 1, "1"), change(ORDERS, 20, 2, "1"))
    destination = PlannedDestination()
    destination.refused = lambda event: event.ordinal == 1
    with LoopRun(root, destination) as loop:
        drain(loop)
        destination.refused = nothing
        (letter,) = loop.progress.parked.values()
        loop.retry(letter)

    assert places_of(destination.delivered) == [(20, 0), (20, 1), (20, 2)]


def test_a_retry_that_fails_at_a_later_change_delivers_nothing_of_it_later(tmp_path: Path):
    root = tmp_path / "log"
    writer = begin_log(root)
    commit_rows(writer, change(ORDERS, 20, 0, "1"))
    commit_rows(writer, change(ORDERS, 30, 0, "1"))
    destination = PlannedDestination()
    destination.refused = lambda event: event.position == 20
    with LoopRun(root, destination, PlainFormat(frozenset({"30.0"})), batch=1) as loop:
        drain(loop)
        destination.refused = nothing
        (letter,) = loop.progress.parked.values()
        with pytest.raises(EventNotEncodable):
            loop.retry(letter)
        commit_rows(writer, change(ORDERS, 40, 0, "2"))
        drain(loop)

    assert places_of(destination.delivered) == [(40, 0)]


def truncate(relation: int, position: int, ordinal: int) -> dict[str, Any]:
    """A TRUNCATE of one of the tables."""
    return change(relation, position, ordinal, "", op="t", key=None, after=None)


def state_of(events: list[Event]) -> dict[tuple[str, str], Any]:
    """What a consumer has after it has applied the events in the order in which it got them."""
    rows: dict[tuple[str, str], Any] = {}
    for event in events:
        operation, key, row = json.loads(event.value or b"")
        if operation == "t":
            rows = {place: one for place, one in rows.items() if place[0] != event.topic}
        else:
            rows[event.topic, str(key)] = row
    return rows


@pytest.mark.parametrize("is_created_again", [True, False])
def test_a_retry_does_not_bring_back_a_row_that_a_truncate_has_removed(tmp_path: Path, is_created_again: bool):
    root = tmp_path / "log"
    writer = begin_log(root)
    commit_rows(writer, change(ORDERS, 20, 0, "1"), change(ITEMS, 20, 1, "1"), change(ORDERS, 20, 2, "2"))
    commit_rows(writer, change(ORDERS, 30, 0, "1"), truncate(ORDERS, 30, 1))
    if is_created_again:
        commit_rows(writer, change(ORDERS, 40, 0, "1"))
    destination = PlannedDestination()
    destination.refused = refused_key("1")
    with LoopRun(root, destination, batch=1) as loop:
        drain(loop)
        destination.refused = nothing
        letters = sorted(loop.progress.parked.values(), key=lambda one: one.topic)
        for letter in letters:
            loop.retry(letter)

    assert [letter.table for letter in letters] == ["shop.items", "shop.orders"]
    assert loop.progress.parked == {}
    assert places_of(destination.delivered) == [(20, 2), (30, 1), (20, 1), *([(40, 0)] if is_created_again else [])]


def test_a_truncate_that_was_not_sent_leaves_nothing_out(tmp_path: Path):
    root = tmp_path / "log"
    writer = begin_log(root)
    commit_rows(writer, change(ORDERS, 20, 0, "1"))
    commit_rows(writer, truncate(ORDERS, 30, 0))
    destination = PlannedDestination()
    destination.refused = lambda _event: True
    with LoopRun(root, destination) as loop:
        drain(loop)
        destination.refused = nothing
        letter = min(loop.progress.parked.values(), key=lambda one: one.first)
        loop.retry(letter)

    assert places_of(destination.delivered) == [(20, 0)]


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_refused_truncate_is_sent_later_only_if_no_row_was_sent_after_it(tmp_path: Path, is_followed: bool):
    root = tmp_path / "log"
    writer = begin_log(root)
    commit_rows(writer, change(ORDERS, 20, 0, "1"), truncate(ORDERS, 20, 1), change(ITEMS, 20, 2, "1"))
    if is_followed:
        commit_rows(writer, change(ORDERS, 30, 0, "2"))
    destination = PlannedDestination()
    destination.refused = lambda event: event.ordinal == 1
    with LoopRun(root, destination) as loop:
        drain(loop)
        destination.refused = nothing
        (letter,) = loop.progress.parked.values()
        if is_followed:
            with pytest.raises(EventRefused, match="sent after it") as refused:
                loop.retry(letter)
            assert "--to 0/13" in refused.value.fix
            loop.discard(letter)
            loop.rewind(Position(0x13))
            drain(loop)
        else:
            loop.retry(letter)

    assert loop.progress.parked == {}
    rows = state_of(destination.delivered)
    assert [place for place in rows if "orders" in place[0]] == ([("shop.shop.orders", "['2']")] if is_followed else [])


def test_a_change_that_cannot_be_encoded_ends_with_a_truncate(tmp_path: Path):
    root = tmp_path / "log"
    writer = begin_log(root)
    commit_rows(writer, change(ORDERS, 20, 0, "1"), truncate(ORDERS, 20, 1))
    destination = PlannedDestination()
    with LoopRun(root, destination, PlainFormat(frozenset({"20.0"}))) as loop:
        drain(loop)
        (letter,) = loop.progress.parked.values()
        loop.retry(letter)

    assert loop.progress.parked == {}
    assert places_of(destination.delivered) == [(20, 1)]


@pytest.mark.parametrize("seed", range(8))
def test_a_consumer_has_the_rows_of_the_source_after_retries_and_truncates(tmp_path: Path, seed: int):
    random, root = Random(seed), tmp_path / "log"
    transactions = list(random_transactions(random, 20, 25, most=5))
    for rows in random.sample(transactions, 6):
        last = rows[-1]
        rows.append(truncate(last["relation"], last["position"], last["ordinal"] + 1))
    commit_in_groups(begin_log(root), transactions, random)
    destination = PlannedDestination()
    destination.refused = lambda event: key_of(event) in (["1"], ["2"], ["3"])
    with LoopRun(root, destination, batch=random.choice((1, 4, 1000))) as loop:
        drain(loop)
        destination.refused = nothing
        for letter in list(loop.progress.parked.values()):
            loop.retry(letter)
    everything = PlannedDestination()
    with LoopRun(root, everything) as loop:
        loop.rewind(Position(0))
        drain(loop)

    assert state_of(destination.delivered) == state_of(everything.delivered)
