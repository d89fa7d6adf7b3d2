"""Format `cdc`: whole events as text."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from cdc.delivery.formats.contract import LogicalMessages
from tests.delivery.formats.changes import (
    ID,
    changes_of,
    column,
    format_named,
    keys_of,
    log_row,
    log_rows,
    schema_with,
    values_of,
)

SCHEMA = schema_with(ID, column("big", 20, "bigint"), column("paid", 16, "boolean"), column("note"))
BEGINNING = '{"position":"0/16E9058","ordinal":0,"op":"%s","topic":"shop.orders","xid":555,'
TIME = '"committed_at":"2019-05-28T08:58:24.863123Z",'


def test_a_change_has_all_members_and_only_small_integers_are_numbers() -> None:
    row = log_row("u", key=["1"], partial=True, after={1: "1", 2: "9007199254740993", 3: "t"})
    events = format_named("cdc").encode(changes_of(SCHEMA, row))
    assert events.values.to_pylist() == [
        BEGINNING % "u" + TIME + '"key":{"id":1},"old_key":null,"before":null,'
        '"after":{"id":1,"big":"9007199254740993","paid":true},"unchanged":["note"]}'
    ]
    assert events.keys.to_pylist() == ['{"id":1}']


def test_a_key_change_is_two_events_as_in_the_log() -> None:
    whole = {1: "2", 2: None, 3: "f", 4: 'a "b"\n'}
    rows = log_row("d", 0, key=["1"], before={1: "1"}), log_row("u", 1, key=["2"], old_key=["1"], after=whole)
    events = format_named("cdc").encode(changes_of(SCHEMA, *rows))
    deleted, updated = values_of(events)
    assert (deleted["op"], deleted["key"], deleted["before"], deleted["after"]) == ("d", {"id": 1}, {"id": 1}, None)
    assert (updated["op"], updated["key"], updated["old_key"]) == ("u", {"id": 2}, {"id": 1})
    assert updated["after"] == {"id": 2, "big": None, "paid": False, "note": 'a "b"\n'}
    assert keys_of(events) == [{"id": 1}, {"id": 2}]


def test_a_truncate_has_neither_key_nor_images() -> None:
    events = format_named("cdc").encode(changes_of(SCHEMA, log_row("s"), log_row("t")))
    assert events.source.tolist() == [1]
    assert events.values.to_pylist() == [
        BEGINNING % "t" + TIME + '"key":null,"old_key":null,"before":null,"after":null,"unchanged":[]}'
    ]
    assert keys_of(events) == [None]


def test_a_masked_integer_is_a_string() -> None:
    events = format_named("cdc").encode(changes_of(SCHEMA, log_row("c", key=["***"], after={1: "***"})))
    assert values_of(events)[0]["after"] == {"id": "***"}


def test_the_second_epoch_is_part_of_the_position() -> None:
    row = log_row("t", position=(2 << 52) + 16)
    assert values_of(format_named("cdc").encode(changes_of(SCHEMA, row)))[0]["position"] == "2:0/10"


def test_a_message_has_prefix_kind_and_content() -> None:
    rows = log_rows([
        log_row("m", relation=None, topic=None, payload=b"\x00\xff", key=["a/b", "f", "0/10"]),
        log_row("m", relation=None, topic=None, payload=None),
    ])  # fmt: skip
    events = format_named("cdc").encode_messages(LogicalMessages("shop.a", rows))
    assert events.values.to_pylist()[0] == (
        '{"position":"0/16E9058","ordinal":0,"op":"m","xid":555,' + TIME + '"lsn":16,"prefix":"a/b",'
        '"transactional":false,"content":"AP8="}'
    )
    assert values_of(events)[1] == {
        "position": "0/16E9058", "ordinal": 0, "op": "m", "xid": 555, "committed_at": "2019-05-28T08:58:24.863123Z",
        "lsn": 24_023_128, "prefix": None, "transactional": None, "content": "",
    }  # fmt: skip
    assert keys_of(events) == [{"prefix": "a/b"}, {"prefix": None}]


def some_change(random: Random, ordinal: int) -> dict[str, Any]:
    """A change with or without each image, column, and value."""
    moment = {"xid": random.randint(1, 2), "committed_at": random.randint(1, 2), "ordinal": ordinal}
    texts = {1: "1", 2: "7", 3: "t", 4: 'a "b"'}
    images = [
        {number: random.choice([text, None]) for number, text in texts.items() if random.random() < 0.8 or number == 1}
        for _ in range(2)
    ]
    before, after = (random.choice([None, image, texts]) for image in images)
    return log_row(random.choice("cudt"), key=random.choice([None, ["1"]]), before=before, after=after, **moment)


@pytest.mark.parametrize("seed", range(40))
def test_changes_have_the_same_events_together_as_each_alone(seed: int) -> None:
    random = Random(seed)
    rows = [some_change(random, ordinal) for ordinal in range(random.randint(1, 8))]
    encoding = format_named("cdc")

    together = encoding.encode(changes_of(SCHEMA, *rows))
    alone = [encoding.encode(changes_of(SCHEMA, row)) for row in rows]

    assert together.values.to_pylist() == [event.values[0].as_py() for event in alone]
    assert together.keys.to_pylist() == [event.keys[0].as_py() for event in alone]
