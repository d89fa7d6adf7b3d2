"""What every destination guarantees: the events that a consumer of it gets, after faults at any point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cdc.delivery.delivery_loop import DeliveryLoop
from cdc.delivery.destinations.contract import ChecksAccess, Destination, Event, EventsRefused, Promise
from cdc.delivery.progress import FOLDER, Progress, delivery_uuid
from cdc.errors import (
    CdcError,
    DeliveryFenced,
    DeliveryOfAnotherLog,
    DestinationUnavailable,
    EventTooLarge,
    ProgressLost,
    Reaction,
)
from cdc.log.consumer_registration import ConsumerRegistration
from cdc.log.reader import LogReader
from cdc.position import Position
from tests.delivery.destinations.receivers import NAMES, Received, Receiver, crash_points, killable, module_of
from tests.delivery.destinations.sending import Assignment, as_columns, event, numbered, run_process
from tests.delivery.loop_run import NAME, LoopRun, drain
from tests.delivery.sent_log import begin_log, change
from tests.fixtures.skips import NO_PROMISE
from tests.fixtures.waiting import until
from tests.log.sample_log import ORDERS, commit_rows


@pytest.fixture(name="receiver", params=NAMES)
def _receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with module_of(request.param).receiver(request) as made:
        yield made


@pytest.fixture(name="killable_receiver", params=killable())
def _killable_receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with module_of(request.param).killable(request) as made:
        yield made


@pytest.fixture(name="destination")
def _destination(receiver: Receiver) -> Iterator[Destination]:
    """An open destination."""
    made = receiver.make()
    made.open()
    yield made
    made.close()


def message(sent: Event) -> Received:
    """What a consumer gets of an event."""
    return Received(sent.id, sent.topic, sent.key, sent.value, sent.headers)


def by_key(messages: Sequence[Received]) -> dict[tuple[str, bytes | None], list[Received]]:
    """The messages of each topic and key, in order, each only where it came first."""
    found: dict[tuple[str, bytes | None], list[Received]] = {}
    for one in dict.fromkeys(messages):
        found.setdefault((one.topic, one.key), []).append(one)
    return found


def check_delivered(receiver: Receiver, sent: Sequence[Event], *, again: bool = False) -> None:
    """A consumer got each event, in the order of its key; again: a destination may have sent some of them twice."""
    expected = [message(one) for one in sent]
    # a destination may show what it has acknowledged a moment later
    got = until(lambda: arrived(receiver, len(expected)), lambda: f"{len(expected)} events, but {receiver.received()}")

    assert by_key(got) == by_key(expected)
    if not again or receiver.make().promise is Promise.EXACTLY_ONCE:
        assert sorted(one.id for one in got) == sorted(one.id for one in sent)


def arrived(receiver: Receiver, number: int) -> list[Received]:
    """What the consumer got, if there are so many different messages."""
    got = receiver.received()
    return got if len({one.id for one in got}) >= number else []


def assignment(receiver: Receiver, folder: Path, *, events: int = 60, batch: int = 20) -> Assignment:
    return Assignment(receiver.make, receiver.topics, events, batch, folder / "progress")


def test_a_consumer_gets_the_bytes_that_were_sent(receiver: Receiver, destination: Destination) -> None:
    first, second = receiver.topics
    sent = [
        event(1, first, b"key", b"value"),
        event(2, second, "Schlüssel ✓".encode(), "größer ✓ \U0001f600".encode()),
        event(3, first, b"\x00\xff\n", bytes(range(256))),
        event(4, second, b"", b"x"),
        event(5, first, b"large", b"0123456789abcdef" * (receiver.largest // 16)),
        event(6, first, b"headers", b"x", *receiver.headers),
    ]
    destination.send(sent)
    destination.commit(b"6")

    check_delivered(receiver, sent)


def test_an_event_may_have_no_key(receiver: Receiver, destination: Destination) -> None:
    receiver.require("events without key")
    sent = [event(number, receiver.topics[0], None, b"value %d" % number) for number in range(3)]
    destination.send(sent)
    destination.commit(b"3")

    got = until(lambda: arrived(receiver, 3), "three events")
    assert sorted(got) == [message(one) for one in sent]


def test_a_tombstone_is_not_an_empty_value(receiver: Receiver, destination: Destination) -> None:
    receiver.require("tombstones")
    topic = receiver.topics[0]
    sent = [event(1, topic, b"key", b"x"), event(2, topic, b"key", b""), event(3, topic, b"key", None)]
    destination.send(sent)
    destination.commit(b"3")

    check_delivered(receiver, sent)


def test_the_events_of_a_key_stay_in_order(receiver: Receiver, destination: Destination) -> None:
    sent, batch = numbered(range(receiver.many), receiver.topics), receiver.many // 8
    for first in range(0, receiver.many, batch):
        middle, after = first + batch // 3, first + batch
        destination.send(as_columns(sent[first:middle]))
        destination.send(sent[middle:after])
        if first % (2 * batch):
            destination.commit(b"%d" % after)

    check_delivered(receiver, sent)


def test_a_destination_does_not_need_the_sequence_after_the_call(receiver: Receiver, destination: Destination) -> None:
    sent = numbered(range(100), receiver.topics)
    passed = list(sent)
    destination.send(passed)
    passed.clear()
    destination.commit(b"100")

    check_delivered(receiver, sent)


def test_nothing_is_visible_before_the_commit(receiver: Receiver, destination: Destination) -> None:
    receiver.require("stores progress")
    sent = numbered(range(100), receiver.topics)
    destination.send(sent)
    before = receiver.received()
    destination.commit(b"100")

    assert before == []
    check_delivered(receiver, sent)


def test_a_destination_continues_after_it_was_closed(receiver: Receiver) -> None:
    destination, sent = receiver.make(), numbered(range(40), receiver.topics)
    opened = []
    for first in range(0, 40, 10):
        opened.append(destination.open())
        destination.send(sent[first : first + 10])
        destination.commit(b"at %d" % first)
        destination.close()

    check_delivered(receiver, sent)
    assert opened == [None, b"at 0", b"at 10", b"at 20"] if destination.stores_progress else [None] * 4


def test_a_batch_without_events_stores_its_progress(receiver: Receiver) -> None:
    destination = receiver.make()
    opened = []
    for number in range(3):
        opened.append(destination.open())
        destination.commit(b"%d" % number)
        destination.close()

    assert receiver.received() == []
    assert opened == [None, b"0", b"1"] if destination.stores_progress else [None] * 3


def test_a_batch_that_was_not_committed_is_sent_again(receiver: Receiver) -> None:
    destination, sent = receiver.make(), numbered(range(100), receiver.topics)
    destination.open()
    destination.send(sent[:20])
    destination.commit(b"20")
    destination.send(sent[20:70])
    destination.close()
    progress = destination.open()
    destination.send(sent[20:])
    destination.commit(b"100")
    destination.close()

    assert progress == (b"20" if destination.stores_progress else None)
    check_delivered(receiver, sent, again=True)


def test_closing_does_not_fail_in_any_state(receiver: Receiver) -> None:
    destination = receiver.make()
    destination.close()
    destination.open()
    destination.close()
    destination.close()
    destination.open()
    destination.send(numbered(range(3), receiver.topics))
    destination.close()

    assert destination.open() is None
    destination.close()


def test_a_refused_event_is_named_and_no_later_event_of_its_key_is_delivered(receiver: Receiver) -> None:
    if receiver.too_large is None:
        pytest.skip(f"{NO_PROMISE}: the destination takes events of any size")
    first, second = receiver.topics
    sent = [
        event(1, first, b"a", b"1"),
        event(2, first, b"b", b"x" * receiver.too_large),
        event(3, first, b"b", b"3"),
        event(4, second, b"b", b"4"),
    ]
    destination = receiver.make()
    destination.open()
    with pytest.raises(EventsRefused) as refused:
        send_and_commit(destination, sent, b"4")

    assert {name: type(error) for name, error in refused.value.refused.items()} == {sent[1].id: EventTooLarge}
    assert message(sent[2]) not in receiver.received()
    rest = [sent[0], sent[3]]
    if not refused.value.others_acknowledged:
        destination.close()
        destination.open()
        send_and_commit(destination, rest, b"4")
    destination.close()
    check_delivered(receiver, rest, again=True)


def send_and_commit(destination: Destination, events: Sequence[Event], progress: bytes) -> None:
    destination.send(events)
    destination.commit(progress)


def test_a_second_process_fences_the_first(receiver: Receiver) -> None:
    receiver.require("stores progress")
    receiver.require("fences")
    first, second = receiver.make(), receiver.make()
    sent = numbered(range(30), receiver.topics)
    first.open()
    send_and_commit(first, sent[:10], b"10")
    first.send(sent[10:20])
    progress = second.open()
    with pytest.raises(DeliveryFenced):
        send_and_commit(first, sent[20:], b"30")
    first.close()
    send_and_commit(second, sent[10:], b"30")
    second.close()

    assert progress == b"10"
    check_delivered(receiver, sent)


def test_a_check_neither_disturbs_a_process_that_sends_nor_creates_anything(receiver: Receiver) -> None:
    destination, other = receiver.make(), receiver.make()
    if not isinstance(other, ChecksAccess):
        pytest.skip(f"{NO_PROMISE}: consumers connect to the destination")
    sent = numbered(range(40), receiver.topics)
    destination.open()
    send_and_commit(destination, sent[:10], b"10")
    destination.send(sent[10:20])
    other.check(receiver.topics)
    destination.send(sent[20:])
    destination.commit(b"40")
    destination.close()
    progress = destination.open()
    destination.close()

    check_delivered(receiver, sent)
    assert progress == (b"40" if destination.stores_progress else None)


@pytest.mark.parametrize(("receiver", "point"), crash_points(), indirect=["receiver"])
def test_a_killed_process_loses_nothing(receiver: Receiver, point: str, tmp_path: Path) -> None:
    given = assignment(receiver, tmp_path)

    assert run_process(given, point if ":" in point else f"{point}:2") == -9
    assert run_process(given) == 0
    check_delivered(receiver, numbered(range(given.events), given.topics), again=True)


def lose(receiver: Receiver, run: LoopRun) -> None:
    """Remove the progress, wherever it is."""
    if receiver.forget_progress is not None:
        receiver.forget_progress()
    else:
        (run.root / FOLDER / f"{delivery_uuid(run.log.log_id, NAME)}.json").unlink()


def store(run: LoopRun, progress: Progress) -> None:
    """Store another progress, as a restored backup does."""
    if run.destination.stores_progress:
        run.destination.open()
        run.destination.commit(progress.to_json())
        run.destination.close()
    else:
        run.store.begin_again(progress)


def test_a_lost_or_foreign_progress_stops_a_delivery_until_a_rewind_and_an_older_one_loses_nothing(
    receiver: Receiver, tmp_path: Path
) -> None:
    root, writer = tmp_path / "log", begin_log(tmp_path / "log")

    def run(position: int) -> LoopRun:
        commit_rows(writer, change(ORDERS, position, 0, "1"))
        return LoopRun(root, receiver.make(), topic=receiver.topics[0])

    def got(*positions: int) -> bool:
        found = receiver.received()
        return {one.id.split("/")[2] for one in found} == {f"{position:X}" for position in positions}

    def register(loop: DeliveryLoop) -> None:
        ConsumerRegistration(root, delivery_uuid(LogReader(root).log_id, NAME), NAME).report(loop.stored.needed)

    with (first := run(20)) as loop:
        drain(loop)
        register(loop)
    until(lambda: got(20), lambda: f"{receiver.received()}")
    sent = receiver.received()

    lose(receiver, first)
    with run(30) as loop:
        with pytest.raises(ProgressLost, match="up to 0/14 was sent") as lost:
            loop.check_stored()
        assert receiver.received() == sent
        assert "'cdc deliveries rewind SINK --to 0/14'" in lost.value.fix
        loop.rewind(Position(20))
        loop.check_stored()
        drain(loop)
    until(lambda: got(20, 30), lambda: f"{receiver.received()}")

    store(last := run(40), Progress(log_id="another", position=Position(50)))
    with last as loop:
        with pytest.raises(DeliveryOfAnotherLog):
            loop.check_stored()
        loop.rewind(Position(30))
        drain(loop)
    until(lambda: got(20, 30, 40), lambda: f"{receiver.received()}")

    store(last := run(50), Progress(log_id=last.log.log_id, position=Position(20)))
    with last as loop:
        loop.check_stored()
        drain(loop)
        assert loop.stored.position == 50
    until(lambda: got(20, 30, 40, 50), lambda: f"{receiver.received()}")


def opened_at_last(destination: Destination) -> bytes | None:
    """Open a destination as the loop does: again after an error that may be temporary."""
    opened: list[bytes | None] = []

    def opens() -> bool:
        try:
            opened.append(destination.open())
        except DestinationUnavailable:
            destination.close()
        return bool(opened)

    until(opens, "a destination that opens")
    return opened[0]


def test_a_server_that_was_killed_in_a_batch_gets_the_batch_again(killable_receiver: Receiver) -> None:
    receiver, server = killable_receiver, killable_receiver.server
    assert server is not None
    destination, sent = receiver.make(), numbered(range(60), receiver.topics)
    opened_at_last(destination)
    send_and_commit(destination, sent[:20], b"20")
    # Mosquitto acknowledges an event a moment before it stores it; the consumer has these before the server dies
    check_delivered(receiver, sent[:20])
    destination.send(sent[20:30])
    server.kill()
    with pytest.raises(CdcError) as failed:
        send_and_commit(destination, sent[30:40], b"40")
    destination.close()
    server.start()
    progress = opened_at_last(destination)
    send_and_commit(destination, sent[20:], b"60")
    destination.close()

    assert failed.value.reaction is Reaction.RETRY
    assert progress == (b"20" if destination.stores_progress else None)
    check_delivered(receiver, sent, again=True)
