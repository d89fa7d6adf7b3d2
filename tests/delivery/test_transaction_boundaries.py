"""Records of the begin and end of transactions: content as Debezium documents it, and counts over random windows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from cdc.delivery.destinations.contract import DeliveryIdentity, Event
from cdc.delivery.event_encoder import EventEncoder
from cdc.delivery.formats import new_format
from cdc.delivery.formats.contract import EncodedEvents, Format
from cdc.delivery.formats.table_changes import TableChanges
from cdc.delivery.progress import ParkedKey, Progress
from cdc.delivery.transaction_boundaries import boundaries_for
from cdc.log.reader import LogReader
from tests.delivery.destinations.planned import PlannedDestination
from tests.delivery.formats.changes import NAMES
from tests.delivery.formats.test_registry_format import read_avro
from tests.delivery.loop_run import NAME, LoopRun, settings_of
from tests.delivery.plain_format import PlainFormat
from tests.delivery.sent_log import begin_log, change, commit_in_groups, random_transactions, schema_version
from tests.fixtures.schema_registry import running_registry
from tests.log.rows import message_row, table
from tests.log.sample_log import ITEMS, ORDERS, commit_rows

TOPIC = "shop.transaction"
EVERYTHING = [{"prefix": "*", "topic": "{pipeline}.message"}]


def options(*, schemas: bool = False, **fields: Any) -> dict[str, Any]:
    """Settings with the records."""
    return {"format": "debezium", "debezium": {"transaction": True, "schemas": schemas}, **fields}


class NumberedFormat(PlainFormat):
    """Has the numbers of a change, `[total, in table]`, as content of its event."""

    def encode(self, changes: TableChanges) -> EncodedEvents:
        """One event per change."""
        encoded, numbers = super().encode(changes), changes.numbers
        assert numbers is not None
        pairs = list(zip(numbers.total.to_pylist(), numbers.in_table.to_pylist(), strict=True))
        return replace(encoded, values=pa.array([json.dumps(pairs[one]) for one in encoded.source], pa.string()))


def sent(*rows: dict[str, Any], made: Format | None = None, **fields: Any) -> list[Event]:
    """The events of one window."""
    settings, identity = settings_of(**options(**fields)), DeliveryIdentity("shop", NAME, "LOG")
    form = made or PlainFormat()
    encoder, boundaries = EventEncoder(settings, identity, form), boundaries_for(settings, identity, form)
    assert boundaries is not None
    known = {ORDERS: schema_version(ORDERS, "name"), ITEMS: schema_version(ITEMS, "name")}
    selected = encoder.selected(table(*rows))
    part = boundaries.added(encoder.encode(selected, known, boundaries.counter.number), selected)
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
    for fields in ({"format": "debezium"}, {"format": "flat"}):
        assert boundaries_for(settings_of(**fields), identity, PlainFormat()) is None


@pytest.mark.parametrize("seed", range(6))
def test_each_transaction_has_one_begin_and_one_end_with_its_counts_over_windows_and_kills(tmp_path: Path, seed: int):
    random, root = Random(seed), tmp_path / "log"
    commit_in_groups(begin_log(root), random_transactions(random, 20, 12, most=9), random)
    events: dict[str, Event] = {}
    progress = Progress(log_id=LogReader(root).log_id)
    while True:  # each turn is a process that dies in or after a window
        run = LoopRun(root, PlannedDestination(), NumberedFormat(), **options(batch=random.choice((1, 2, 5, 10_000))))
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
        assert [json.loads(event.value or b"") for event in changes] == expected_numbers(changes)


def expected_numbers(changes: list[Event]) -> list[list[int]]:
    """Number of each event in the transaction and in its table, counted one by one."""
    counts: Counter[str] = Counter()
    found = []
    for number, event in enumerate(changes, start=1):
        counts[event.topic] += 1
        found.append([number, counts[event.topic]])
    return found


def test_a_change_that_cannot_be_encoded_keeps_its_number_until_it_is_sent(tmp_path: Path):
    root = tmp_path / "log"
    rows = [
        change(ORDERS, 20, 4, "1", after=[(1, "1"), (2, "bad")]),
        change(ITEMS, 20, 7, "2"),
        change(ORDERS, 20, 9, "3"),
    ]
    alone = change(ORDERS, 30, 0, "1")
    commit_rows(begin_log(root), *rows, {**alone, "after": [(1, "1"), (2, "bad")]})
    run = LoopRun(root, PlannedDestination(), NumberedFormat(frozenset({"bad"})), **options(batch=1))
    events, letters = list[Event](), list[ParkedKey]()
    progress = Progress(log_id=run.log.log_id)
    while (window := run.source.next(progress)) is not None:
        for part in window.parts:
            events += part.encoded.events
            letters += [letter for letter, _ in part.encoded.refused]
        progress = replace(progress, position=window.upto)
    run.source.close()
    run = LoopRun(root, PlannedDestination(), NumberedFormat(), **options(batch=1))
    retried = [event for found in run.source.events_of_key(letters[0], progress) for event in found]
    run.source.close()

    assert [(event.position, json.loads(event.value or b"")) for event in events if event.topic != TOPIC] == [
        (20, [2, 1]),
        (20, [3, 2]),
    ]
    assert [(event.position, json.loads(event.value or b"")) for event in retried] == [(20, [1, 1]), (30, [1, 1])]
    records = [json.loads(event.value or b"") for event in events if event.topic == TOPIC]
    assert [(one["status"], one["event_count"]) for one in records] == [
        ("BEGIN", None),
        ("END", 3),
        ("BEGIN", None),
        ("END", 1),
    ]


def test_the_envelope_has_the_numbers_and_other_rows_have_no_transaction():
    settings = settings_of(**options())
    rows = [change(ORDERS, 20, 3, "1"), change(ITEMS, 20, 8, "1"), change(ORDERS, 30, 0, "1", op="r")]
    found = [json.loads(event.value or b"") for event in sent(*rows, made=new_format(settings, NAMES))]

    assert [one["transaction"] for one in found if "op" in one] == [
        {"id": "1:20", "total_order": 1, "data_collection_order": 1},
        {"id": "1:20", "total_order": 2, "data_collection_order": 1},
        None,
    ]


@pytest.mark.parametrize("encoding", ["avro", "protobuf"])
def test_the_records_have_the_encoding_of_the_events(encoding: str):
    with running_registry() as (url, state):
        fields: Any = {"encoding": encoding, "schema_registry": {"url": url}}
        made = new_format(settings_of(**options(**fields)), NAMES)
        begin, _, end = sent(change(ORDERS, 20, 0, "1", xid=571), made=made, **fields)

    assert {f"{TOPIC}-key", f"{TOPIC}-value"} <= state.subjects.keys()
    assert (begin.value or b"")[:1] == (end.key or b"")[:1] == b"\0"
    if encoding == "avro":
        assert read_avro(state, end.key) == {"id": "571:20"}
        assert read_avro(state, begin.value)["data_collections"] is None
        assert read_avro(state, end.value) == {
            "status": "END",
            "id": "571:20",
            "event_count": 1,
            "data_collections": [{"data_collection": "shop.orders", "event_count": 1}],
            "ts_ms": read_avro(state, begin.value)["ts_ms"],
        }
