"""The published state of a search server sink: fenced, exact after a crash, with its parked rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc.errors import SinkError, SinkFenced, SinkOfAnotherLog
from cdc.targets.dead_letter_rows import ParkedRow
from cdc.targets.published_record import Published, TableRecord, TargetState
from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.sink_state import SinkState
from pipelines.sinks.search_server.publisher import Publisher, open_publisher
from pipelines.sinks.unpublished_parked_rows import UnpublishedParkedRows
from tests.contracts.folded import ORDERS
from tests.fixtures.http_relay import HttpRelay, LoseAnswer
from tests.fixtures.search_sinks import search_sink

KEEP = 86_400.0


@pytest.fixture
def client(opensearch, opensearch_relay: HttpRelay) -> Iterator[SearchClient]:
    with SearchClient(search_sink(opensearch, url=opensearch_relay.url).access, "opensearch") as client:
        yield client


def opened(client: SearchClient, parked: UnpublishedParkedRows | None = None, log_id: str = "log-1") -> Publisher:
    return open_publisher(client, "find", log_id, parked or UnpublishedParkedRows())


def cut(position: int, *parked: tuple[str, ...]) -> Published:
    record = TableRecord(
        relation=ORDERS.relation,
        topic=ORDERS.topic,
        target="orders.r1.1",
        position=position,
        version=None,
        state=TargetState.STREAMING.value,
        schema=ORDERS.to_json().decode(),
        parked=parked,
    )
    return Published(position, 0, {record.relation: record})


def row(key: str, upto: int) -> ParkedRow:
    return ParkedRow(
        relation=ORDERS.relation, topic=ORDERS.topic, key=(key,), position=upto, ordinal=0, committed_at=0,
        image={1: key, 2: "a"}, complete=True, code="CDC-3038", message="refused", first_at=0, upto=upto,
    )  # fmt: skip


def test_the_next_driver_reads_what_was_published(client):
    first = opened(client)
    first.floors["orders.r1.1"] = 7
    first.replace(cut(20), KEEP)
    second = opened(client)

    assert (second.record, second.floors) == (cut(20), {"orders.r1.1": 7})


def test_a_lost_answer_to_the_publish_is_no_other_driver(client, opensearch_relay: HttpRelay):
    publisher = opened(client)
    publisher.replace(cut(20), KEEP)
    fault = opensearch_relay.fault(r"^PUT .*/published", LoseAnswer(), times=2)
    publisher.replace(cut(30), KEEP)
    publisher.replace(cut(40), KEEP)

    assert (fault.done, opened(client).record) == (2, cut(40))


@pytest.mark.parametrize("position", [20, 30])
def test_only_the_driver_that_opened_last_publishes(client, position):
    first, second = opened(client), opened(client)
    second.replace(cut(20), KEEP)
    with pytest.raises(SinkFenced):
        first.replace(cut(position), KEEP)

    assert opened(client).record == cut(20)


def test_a_published_position_does_not_go_back(client):
    publisher = opened(client)
    publisher.replace(cut(20), KEEP)

    with pytest.raises(SinkError, match="0/14"):
        publisher.check(cut(19))


def test_another_log_is_refused(client):
    opened(client)

    with pytest.raises(SinkOfAnotherLog, match="log-1"):
        opened(client, log_id="log-2")


def test_what_a_crash_left_ahead_is_said_until_it_is_published(client):
    crashed = opened(client)
    crashed.replace(cut(20), KEEP)
    crashed.declare(40)
    publisher, states = opened(client), []
    for position in (30, 40):
        publisher.declare(position)
        publisher.replace(cut(position), KEEP)
        assert publisher.record is not None
        states.append(publisher.record.tables[ORDERS.relation].state)

    assert states == [TargetState.CATCHING_UP, TargetState.STREAMING]


def test_parked_rows_are_published_with_the_record_and_not_before(client):
    parked = UnpublishedParkedRows()
    publisher = opened(client, parked)
    before = publisher.replace(cut(20), KEEP)
    parked.confirm(ORDERS.relation, {("1",): row("1", 30)})
    unpublished = UnpublishedParkedRows()
    opened(client, unpublished)
    assert unpublished.rows_of(ORDERS.relation) == {}
    # the publisher opened last is another one now
    publisher = opened(client, parked)
    parked.confirm(ORDERS.relation, {("1",): row("1", 30)})
    before = publisher.replace(cut(30, ("1",)), KEEP)
    publisher.remove_unused(before, ())
    loaded = UnpublishedParkedRows()
    publisher = opened(client, loaded)
    assert loaded.rows_of(ORDERS.relation) == {("1",): row("1", 30)}
    loaded.confirm(ORDERS.relation, {})
    before = publisher.replace(cut(40), KEEP)
    publisher.remove_unused(before, ())

    index = SinkState(client, "find").index
    assert client.ask("POST", f"/{index}/_count").body["count"] is not None
    assert client.ask("GET", f"/{index}/_doc/parked-{ORDERS.relation}-30", allowed=(404,)).status == 404
