"""Records of the begin and end of transactions: content as Debezium documents it, and counts over random windows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cdc.delivery.destinations.contract import DeliveryIdentity, Event
from cdc.delivery.event_encoder import EventEncoder
from cdc.delivery.progress import Progress
from cdc.delivery.transaction_boundaries import boundaries_for
from cdc.log.reader import LogReader
from tests.delivery.destinations.planned import PlannedDestination
from tests.delivery.loop_run import NAME, LoopRun, settings_of
from tests.delivery.plain_format import PlainFormat
from tests.delivery.sent_log import begin_log, change, commit_in_groups, random_transactions, schema_version
from tests.log.rows import message_row, table
from tests.log.sample_log import ITEMS, ORDERS

TOPIC = "shop.transaction"
EVERYTHING = [{"prefix": "*", "topic": "{pipeline}.message"}]


def options(*, schemas: bool = False, **fields: Any) -> dict[str, Any]:
    """Settings with the records."""
    return {"format": "debezium", "debezium": {"transaction": True, "schemas": schemas}, **fields}


def sent(*rows: dict[str, Any], **fields: Any) -> list[Event]:
    """The events of one window."""
    settings, identity = settings_of(**options(**fields)), DeliveryIdentity("shop", NAME, "LOG")
    encoder, boundaries = EventEncoder(settings, identity, PlainFormat()), boundaries_for(settings, identity)
    assert boundaries is not None
    known = {ORDERS: schema_version(ORDERS, "name"), ITEMS: schema_version(ITEMS, "name")}
    selected = encoder.selected(table(*rows))
    part = boundaries.added(encoder.encode(selected, known), selected)
    assert [part.letters(n).topic for n in range(len(part.events))] == [event.topic for event in part.events]
    return [*part.events, *boundaries.end().events]


def test_the_records_have_the_fields_that_debezium_documents():
    begin, _, _, end = sent(change(ORDERS, 20, 0, "1", xid=571), change(ITEMS, 20, 3, "1", xid=571))

    assert (begin.id, end.id) == ("LOG/0/14/0/begin", "LOG/0/14/3/end")
    assert (begin.topic, begin.key) == (end.topic, end.key) == (TOPIC, b'{"id":"571:20"}')
    first, last = json.loads(begin.value or b""), json.loads(end.value or b"")
    assert first.pop("ts_ms") == last.pop("ts_ms")
    assert first == {"status": "BEGIN", "id": "571:20", "event_count": None, "data_collections": None}
    assert last == {
        "status": "END",
        "id": "571:20",
        "event_count": 2,
        "data_collections": [
            {"data_collection": "shop.orders", "event_count": 1},
            {"data_collection": "shop.items", "event_count": 1},
        ],
    }


def test_key_and_value_contain_their_schemas():
    begin, *_ = sent(change(ORDERS, 20, 0, "1"), schemas=True)

    key, value = json.loads(begin.key or b""), json.loads(begin.value or b"")
    assert key["schema"]["name"] == "io.debezium.connector.common.TransactionMetadataKey"
    assert [field["field"] for field in value["schema"]["fields"]] == list(value["payload"])


def test_copied_rows_and_messages_outside_transactions_have_no_records():
    rows = [
        message_row(18, 0, prefix="a", key=["a", "f", "0/13"]),
        message_row(20, 0, prefix="a", key=["a", "t", "0/13"]),
        change(ORDERS, 20, 1, "1"),
        change(ORDERS, 30, 0, "1", op="r"),
    ]

    found = sent(*rows, messages=EVERYTHING)

    assert [event.topic for event in found] == [
        "shop.message", TOPIC, "shop.message", "shop.shop.orders", TOPIC, "shop.shop.orders",
    ]  # fmt: skip
    assert json.loads(found[4].value or b"")["event_count"] == 2


def test_other_formats_and_a_delivery_without_the_option_have_no_records():
    identity = DeliveryIdentity("shop", NAME, "LOG")
    for fields in ({"format": "debezium"}, options(format="flat")):
        assert boundaries_for(settings_of(**fields), identity) is None


@pytest.mark.parametrize("seed", range(6))
def test_each_transaction_has_one_begin_and_one_end_with_its_counts_over_windows_and_kills(tmp_path: Path, seed: int):
    random, root = Random(seed), tmp_path / "log"
    commit_in_groups(begin_log(root), random_transactions(random, 20, 12, most=9), random)
    events: dict[str, Event] = {}
    progress = Progress(log_id=LogReader(root).log_id)
    while True:  # each turn is a process that dies in or after a window
        run = LoopRun(root, PlannedDestination(), **options(batch=random.choice((1, 2, 5, 10_000))))
        window = run.source.next(progress)
        run.source.close()
        if window is None:
            break
        found = [event for part in window.parts for event in part.encoded.events]
        is_complete = random.random() < 0.6
        for event in found if is_complete else found[: random.randint(0, len(found))]:
            assert events.setdefault(event.id, event) == event
        if is_complete:
            progress = Progress(log_id=progress.log_id, position=window.upto, bootstrap=window.window.bootstrap)

    by_position: dict[int, list[Event]] = {}
    for event in events.values():
        by_position.setdefault(event.position, []).append(event)
    assert len(by_position) == 12
    for begin, *changes, end in by_position.values():
        first, last = (json.loads(event.value or b"") for event in (begin, end))
        assert (first["status"], last["status"], last["event_count"]) == ("BEGIN", "END", len(changes))
        counts = {one["data_collection"]: one["event_count"] for one in last["data_collections"]}
        assert counts == Counter(event.topic.removeprefix("shop.") for event in changes)
