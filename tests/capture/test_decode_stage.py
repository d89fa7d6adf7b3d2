"""Decode stage: repeated Relation messages, and signals that are stored before their transaction is durable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.capture.decode_stage import DecodeStage, ResumePoint, StreamObservers
from cdc.capture.schema_tracker import CaptureFilter, SchemaTracker
from cdc.capture.spool import Spool
from cdc.config import Secret
from cdc.log_row import DDL_PREFIX, HEARTBEAT_PREFIX, SIGNAL_PREFIX, WATERMARK_PREFIX
from cdc.lsn import Lsn
from cdc.pgoutput.decoder_events import DecodedRows, RelationSeen
from cdc.pgoutput.message_parser import FrameBatch
from cdc.pgoutput.messages import AnyMessage, Insert, Message
from cdc.position import Position
from cdc.snapshot.debezium_signal_queue import SignalQueue
from cdc.table import TableSchema
from tests.pgoutput.encode import POSTGRES_EPOCH, placed_frame
from tests.pgoutput.streams import ORDERS, relation, transaction

ROW = Insert(ORDERS.oid, ("1", "a", "b"))


class Catalogue(SchemaTracker):
    """Knows one table, and records the position of every catalogue query."""

    def __init__(self) -> None:
        super().__init__(CaptureFilter(dsn="", publication=""), {}, 0)
        self.asked: list[Position] = []

    def detect_drift(self) -> Iterator[TableSchema]:
        return iter(())

    def is_authentic(self, content: bytes) -> bool:
        return content == b"news"

    def apply_ddl(self, content: bytes) -> Iterator[TableSchema]:
        return iter([ORDERS] if content else ())

    def resolve_relation(self, event: RelationSeen) -> tuple[TableSchema, bool]:
        assert event.relation.oid == ORDERS.oid
        self.asked.append(event.position)
        return ORDERS, len(self.asked) == 1


@pytest.fixture(name="catalogue")
def _catalogue() -> Catalogue:
    return Catalogue()


def decoded(catalogue: Catalogue, folder: Path, *transactions: list[AnyMessage]) -> list[int]:
    """Number of rows and `s` rows of each transaction."""
    decoding = DecodeStage(Spool(folder), catalogue, ResumePoint(Position(0)), StreamObservers())
    counts = []
    for messages in transactions:
        events = decoding.rows(FrameBatch.of([placed_frame(message) for message in messages]))
        counts.append(sum(event.rows.num_rows for event in events if isinstance(event, DecodedRows)))
    decoding.close()
    return counts


@pytest.mark.parametrize("transactional", [True, False])
def test_signals_are_stored_before_the_log_can_contain_their_transaction(
    catalogue: Catalogue, tmp_path: Path, transactional: bool
) -> None:
    """A row of the signal table, and a message in its transaction or after it."""
    signals = SignalQueue(tmp_path, ORDERS.topic, Secret("s3cret", {"env": "SIGNALS"}))
    content = b'{"type": "stop-snapshot", "secret": "s3cret"}'
    signal = Message(transactional, Lsn(10 if transactional else 21), SIGNAL_PREFIX, content, POSTGRES_EPOCH)
    row = Insert(ORDERS.oid, ("r", "pause-snapshot", None))
    inside, behind = ([signal], []) if transactional else ([], [signal])
    messages = [*transaction(10, relation(ORDERS), row, *inside), *behind]
    observers = StreamObservers(signals=signals)
    decoding = DecodeStage(Spool(tmp_path), catalogue, ResumePoint(Position(0)), observers)
    (_decoded,) = kept = [
        [signal.type.value for signal in signals.stored()]
        for event in decoding.rows(FrameBatch.of([placed_frame(message) for message in messages]))
        if isinstance(event, DecodedRows)
    ]
    decoding.close()
    assert kept == [["pause-snapshot", "stop-snapshot"]]


def test_a_relation_message_that_its_transaction_repeats_is_resolved_once(catalogue: Catalogue, tmp_path: Path) -> None:
    repeated: list[AnyMessage] = [relation(ORDERS), ROW] * 50
    assert decoded(catalogue, tmp_path, transaction(10, *repeated)) == [51]
    assert catalogue.asked == [Position(10)]


def test_the_same_relation_message_in_the_next_transaction_is_resolved_again(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    once: list[AnyMessage] = [relation(ORDERS), ROW]
    assert decoded(catalogue, tmp_path, transaction(10, *once), transaction(20, *once)) == [2, 1]
    assert catalogue.asked == [Position(10), Position(20)]


def test_a_relation_message_after_a_ddl_message_is_resolved_again(catalogue: Catalogue, tmp_path: Path) -> None:
    ddl = Message(True, Lsn(10), "cdc.ddl", b"news", POSTGRES_EPOCH)
    decoded(catalogue, tmp_path, transaction(10, relation(ORDERS), ROW, ddl, relation(ORDERS), ROW))
    assert catalogue.asked == [Position(10)] * 2


def test_messages_that_others_write_under_our_prefixes_do_not_divide_the_rows(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    """Each batch of rows costs a file, or at least a query of the windows."""
    forged: list[AnyMessage] = [
        Message(True, Lsn(10), prefix, b"forged", POSTGRES_EPOCH)
        for prefix in (DDL_PREFIX, WATERMARK_PREFIX, SIGNAL_PREFIX, HEARTBEAT_PREFIX)
    ]
    messages = transaction(10, relation(ORDERS), *[ROW, *forged] * 100)
    decoding = DecodeStage(Spool(tmp_path), catalogue, ResumePoint(Position(0)), StreamObservers())
    events = list(decoding.rows(FrameBatch.of([placed_frame(message) for message in messages])))
    decoding.close()

    assert [event.rows.num_rows for event in events if isinstance(event, DecodedRows)] == [101]
    assert len(events) == 1
