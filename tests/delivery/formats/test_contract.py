"""What every format promises: events in order, arrays of one length, JSON, and refusals that name no value."""

from __future__ import annotations

import json

import pytest

from cdc.config.deliveries import EventFormat
from cdc.delivery.formats.contract import TOMBSTONE, Headers, LogicalMessages
from tests.delivery.formats.changes import ID, changes_of, column, format_named, log_row, log_rows, schema_with

SCHEMA = schema_with(ID, column("price", 1700, "numeric", typmod=(5 << 16 | 2) + 4), column("note"))
ROWS = (
    log_row("s", 0),
    log_row("r", 1, key=["1"], after={1: "1", 2: "1.00", 3: "a"}),
    log_row("u", 2, key=["1"], after={1: "1", 2: "NaN", 3: "secret"}),
    log_row("t", 3),
    log_row("d", 4, key=["1"], before={1: "1"}),
    log_row("d", 5, key=["2"], before={1: "2"}),
    log_row("u", 6, key=["3"], old_key=["2"], after={1: "3", 2: None}),
)


@pytest.mark.parametrize("name", list(EventFormat))
@pytest.mark.parametrize("schemas", [False, True])
def test_events_of_changes_are_in_order_and_have_one_length(name: str, schemas: bool) -> None:
    events = format_named(name, schemas=schemas).encode(changes_of(SCHEMA, *ROWS))
    count = len(events.source)
    assert (len(events.keys), len(events.values)) == (count, count)
    assert events.source.tolist() == sorted(events.source.tolist())
    suffixes = events.suffixes or [""] * count
    headers: list[Headers] = events.headers or [()] * count
    assert (len(suffixes), len(headers)) == (count, count)
    assert len(set(zip(events.source.tolist(), suffixes, strict=True))) == count
    for suffix, text in zip(suffixes, events.values.to_pylist(), strict=True):
        assert (text is None) == (suffix == TOMBSTONE)
        assert text is None or json.loads(text)
    sent = set(events.source.tolist())
    assert sent.isdisjoint(events.refused)
    assert sent | set(events.refused) == set(range(1, len(ROWS)))
    assert all("NaN" not in str(error) and "secret" not in str(error) for error in events.refused.values())


@pytest.mark.parametrize("name", list(EventFormat))
def test_no_changes_have_no_events(name: str) -> None:
    events = format_named(name).encode(changes_of(SCHEMA))
    assert (len(events.source), len(events.keys), len(events.values)) == (0, 0, 0)


@pytest.mark.parametrize("name", list(EventFormat))
def test_every_message_is_one_event(name: str) -> None:
    rows = log_rows([log_row("m", number, relation=None, topic=None, payload=b"x") for number in range(3)])
    events = format_named(name).encode_messages(LogicalMessages("shop.m", rows))
    assert events.source.tolist() == [0, 1, 2]
    assert all(json.loads(text) for text in events.values.to_pylist())
