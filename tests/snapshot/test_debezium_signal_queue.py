"""The inbox: signals are on disk in the order of the stream, once each, and nothing that can be sent does harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from cdc.config import Secret
from cdc.errors import ConfigError, LogCorrupt, LogUnwritable
from cdc.pgoutput.decoder_events import SignalSeen
from cdc.position import Position
from cdc.snapshot.debezium_signal_queue import (
    CONTENT_LIMIT,
    FOLDER,
    SIGNALS_LIMIT,
    Channel,
    Signal,
    SignalQueue,
    SignalType,
    parse_json_object,
)
from cdc.table import Column, ReplicaIdentity, TableSchema
from tests.fixtures.examples import examples
from tests.log.rows import row, table

SECRET = Secret("s3cret", {"env": "SIGNALS"})
PAUSE = {"id": "p1", "type": "pause-snapshot"}


def signals_table(*names: str, oid: int = 7, name: str = "signals") -> TableSchema:
    """A table of text columns whose ids are 11, 12, …"""
    columns = [Column(id=11 + n, name=c, type_oid=25, type_name="text", key=None) for n, c in enumerate(names)]
    return TableSchema(
        relation=oid, oid=oid, schema="shop", name=name, replica_identity=ReplicaIdentity.FULL, columns=tuple(columns)
    )


def seen(content: Any, position: int = 100, ordinal: int = 0) -> SignalSeen:
    """A message; what is no bytes is sent as JSON, with the secret."""
    raw = content if isinstance(content, bytes) else json.dumps({**content, "secret": "s3cret"}).encode()
    return SignalSeen(raw, Position(position), ordinal)


def insert(position: int, values: list[str | None], **fields: Any) -> dict[str, Any]:
    """A new row of the table of signals."""
    after = [(11 + n, value) for n, value in enumerate(values)]
    return row(position, relation=7, topic="shop.signals", key=None, after=after) | fields


def keep_rows(inbox: SignalQueue, *rows: dict[str, Any]) -> None:
    for batch in table(*rows).to_batches():
        inbox.store_rows(batch)


def test_a_message_is_kept_as_it_was_sent(tmp_path: Path) -> None:
    queue = SignalQueue(tmp_path, secret=SECRET)
    queue.store_message(seen({"id": "a", "type": "execute-snapshot", "data": {"data-collections": ["shop.t"]}}, 100, 3))
    (signal,) = queue.stored()
    assert signal == Signal(100, 3, 1, Channel.MESSAGE, "a", SignalType.EXECUTE, '{"data-collections": ["shop.t"]}')


@pytest.mark.parametrize(
    ("fields", "name", "body"),
    [
        ({"type": "stop-snapshot", "data": '{"type": "incremental"}'}, "", '{"type": "incremental"}'),
        ({"type": "stop-snapshot", "id": 5, "data": None}, "5", ""),
        ({"type": "stop-snapshot", "id": None, "more": 1}, "", ""),
        ({"type": "stop-snapshot", "data": []}, "", "[]"),
    ],
)
def test_id_and_data_may_be_missing_and_data_a_text(
    tmp_path: Path, fields: dict[str, Any], name: str, body: str
) -> None:
    queue = SignalQueue(tmp_path, secret=SECRET)
    queue.store_message(seen(fields))
    (signal,) = queue.stored()
    assert (signal.id, signal.body) == (name, body)


@pytest.mark.parametrize("names", [("id", "type", "data"), ("a", "b", "c", "d")])
def test_a_new_row_is_a_signal_by_the_order_of_its_columns(tmp_path: Path, names: tuple[str, ...]) -> None:
    queue = SignalQueue(tmp_path, "shop.signals", SECRET)
    queue.set_schema(signals_table(*names))
    values: list[str | None] = ["s1", "execute-snapshot", "{}", "else"]
    keep_rows(queue, insert(100, values[: len(names)]), row(100, 1))
    assert queue.stored() == [Signal(100, 0, 1, Channel.TABLE, "s1", SignalType.EXECUTE, "{}")]


@pytest.mark.parametrize("values", [["s1", "pause-snapshot"], ["s1", "pause-snapshot", None]])
def test_a_row_without_data_is_a_signal(tmp_path: Path, values: list[str | None]) -> None:
    queue = SignalQueue(tmp_path, "shop.signals", SECRET)
    queue.set_schema(signals_table("id", "type", "data"))
    keep_rows(queue, insert(100, values))
    assert [signal.body for signal in queue.stored()] == [""]


@pytest.mark.parametrize("op", ["r", "u", "d"])
def test_a_row_that_is_not_new_is_none(tmp_path: Path, op: str) -> None:
    """Copies and backfills of the table would ask for everything again that was ever asked for."""
    queue = SignalQueue(tmp_path, "shop.signals", SECRET)
    queue.set_schema(signals_table("id", "type", "data"))
    keep_rows(queue, insert(100, ["s1", "pause-snapshot", None], op=op))
    assert queue.stored() == []


def test_a_row_of_another_table_is_none(tmp_path: Path) -> None:
    queue = SignalQueue(tmp_path, "shop.signals", SECRET)
    queue.set_schema(signals_table("id", "type", "data"))
    queue.set_schema(signals_table("id", "type", "data", oid=8, name="others"))
    keep_rows(queue, insert(100, ["s1", "pause-snapshot", None], topic="shop.others", relation=8))
    assert queue.stored() == []


def test_what_comes_again_replaces_itself_whatever_its_ordinal_is_then(tmp_path: Path) -> None:
    queue = SignalQueue(tmp_path, secret=SECRET)
    queue.store_message(seen(PAUSE, 100, 3))
    queue.store_message(seen(PAUSE, 100, 4))
    assert [signal.ordinal for signal in SignalQueue(tmp_path, secret=SECRET).stored()] == [4]


def test_they_wait_in_the_order_of_the_stream(tmp_path: Path) -> None:
    queue = SignalQueue(tmp_path, secret=SECRET)
    places = [(300, 0), (100, 10), (100, 9), (20, 0)]
    for position, ordinal in places:
        queue.store_message(seen({"id": f"{position}/{ordinal}", "type": "stop-snapshot"}, position, ordinal))
    assert [signal.id for signal in queue.stored()] == ["20/0", "100/9", "100/10", "300/0"]


def test_messages_between_rows_are_told_apart_and_stand_before_the_next_row(tmp_path: Path) -> None:
    """Rows come to the queue after messages of the same transaction, a batch at a time."""
    queue = SignalQueue(tmp_path, "shop.signals", SECRET)
    queue.set_schema(signals_table("id", "type", "data"))
    for name, ordinal in (("m1", 0), ("m2", 0), ("m3", 1), ("m4", 2), ("m5", 2)):
        queue.store_message(seen({"id": name, "type": "stop-snapshot"}, 100, ordinal))
    keep_rows(queue, *(insert(100, [f"r{n}", "stop-snapshot", None], ordinal=n) for n in range(2)))
    assert [signal.id for signal in SignalQueue(tmp_path, secret=SECRET).stored()] == [
        "m1",
        "m2",
        "r0",
        "m3",
        "r1",
        "m4",
        "m5",
    ]


def test_one_that_was_carried_out_is_gone_for_good(tmp_path: Path) -> None:
    queue = SignalQueue(tmp_path, secret=SECRET)
    queue.store_message(seen(PAUSE))
    queue.store_message(seen(PAUSE, 200))
    first, second = queue.stored()
    queue.remove(first)
    queue.remove(first)
    assert SignalQueue(tmp_path, secret=SECRET).stored() == [second]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b'"pause-snapshot"',
        b"[" * 60_000,
        b'{"type": ' * 6_000,
        b'{"type": "pause-snapshot", "id": "\\ud800"}',
        b'{"type": "pause-snapshot", "id": "\\u0000"}',
        b'{"type": "pause-snapshot", "id": "' + b"x" * CONTENT_LIMIT + b'"}',
        b"9" * 10_000,
    ],
)
def test_a_malformed_message_is_logged_and_ignored(tmp_path: Path, content: bytes) -> None:
    queue = SignalQueue(tmp_path, secret=SECRET)
    with capture_logs() as lines:
        queue.store_message(seen(content + b' "s3cret"'))
    assert queue.stored() == []
    assert [line["log_level"] for line in lines] == ["warning"]


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("more", [{}, {"secret": "S3CRET"}, {"secret": None}, {"id": "s3cret"}])
def test_messages_without_the_secret_are_no_signals_and_are_logged_once(
    tmp_path: Path, secret: Secret | None, more: dict[str, Any]
) -> None:
    queue = SignalQueue(tmp_path, secret=secret)
    with capture_logs() as lines:
        for position in range(100):
            queue.store_message(seen(json.dumps(PAUSE | more).encode(), position))
    assert queue.stored() == []
    assert len(lines) <= 1


@pytest.mark.parametrize("kind", ["log", "schema-changes", "", None, 7, {"type": "pause-snapshot"}, "PAUSE-SNAPSHOT"])
def test_an_unknown_type_is_logged_and_ignored(tmp_path: Path, kind: object) -> None:
    queue = SignalQueue(tmp_path, secret=SECRET)
    with capture_logs() as lines:
        queue.store_message(seen({"id": "x", "type": kind}))
    assert queue.stored() == []
    assert [line["event"] for line in lines] == ["ignored a signal of an unknown type"]


def test_what_a_debezium_connector_writes_for_itself_is_not_even_logged(tmp_path: Path) -> None:
    queue = SignalQueue(tmp_path, "shop.signals", SECRET)
    queue.set_schema(signals_table("id", "type", "data"))
    with capture_logs() as lines:
        keep_rows(queue, *(insert(100, ["x", f"snapshot-window-{what}", "{}"]) for what in ("open", "close")))
    assert (queue.stored(), lines) == ([], [])


@examples(12, suppress_health_check=list(HealthCheck))
@given(st.one_of(st.binary(max_size=40), st.recursive(st.none() | st.text(max_size=5), st.lists).map(json.dumps)))
def test_nothing_that_can_be_sent_stops_the_reader(tmp_path: Path, content: bytes | str) -> None:
    queue = SignalQueue(tmp_path, secret=SECRET)
    text = content if isinstance(content, str) else json.dumps(content.decode("latin1"))
    shapes = [
        content,
        f'{{"type": {text}}}',
        f'{{"type": "stop-snapshot", "id": {text}, "data": {text}, "secret": "s3cret"}}',
    ]
    for shape in shapes:
        queue.store_message(seen(shape if isinstance(shape, bytes) else shape.encode()))
    for signal in queue.stored():
        assert signal.type is SignalType.STOP
        signal.body.encode()
        queue.remove(signal)


def test_a_flood_is_cut_off_with_one_line_and_heard_again_once_there_is_room(tmp_path: Path) -> None:
    queue = SignalQueue(tmp_path, secret=SECRET)
    (tmp_path / FOLDER).mkdir()
    queue.store_message(seen(PAUSE, 1))
    (first,) = queue.stored()
    (kept,) = (tmp_path / FOLDER).iterdir()
    for number in range(SIGNALS_LIMIT - 1):
        (kept.parent / f"{number}.json").write_bytes(kept.read_bytes())
    with capture_logs() as lines:
        for position in (2, 3):
            queue.store_message(seen(PAUSE, position))
    assert len(lines) == 1
    assert len(queue.stored()) == SIGNALS_LIMIT
    queue.remove(first)
    queue.store_message(seen(PAUSE, 4))
    assert [signal.position for signal in queue.stored()].count(4) == 1


def test_a_draft_of_a_killed_process_is_no_signal(tmp_path: Path) -> None:
    queue = SignalQueue(tmp_path, secret=SECRET)
    queue.store_message(seen(PAUSE))
    (kept,) = (tmp_path / FOLDER).iterdir()
    (kept.parent / f".{kept.name}.draft.json").write_text("{")
    assert len(queue.stored()) == 1


def test_a_file_that_is_none_of_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "x.json").write_text('{"position": 1}')
    with pytest.raises(LogCorrupt, match=r"'x\.json'"):
        SignalQueue(tmp_path, secret=SECRET).stored()


def test_a_disk_that_takes_nothing_is_an_error_that_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("no directory")
    with pytest.raises(LogUnwritable, match="file exists"):
        SignalQueue(tmp_path, secret=SECRET).store_message(seen(PAUSE))


@pytest.mark.parametrize("text", ["[1]", "1", "{", '{"a": "\\ud800"}'])
def test_only_objects_of_proper_text_are_parsed(text: str) -> None:
    assert parse_json_object('{"a": "é"}') == {"a": "é"}
    with pytest.raises(ConfigError, match="expected a JSON object"):
        parse_json_object(text)
