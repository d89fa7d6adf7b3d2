"""Schema tracker: relations that are not captured, and DDL messages that change a known table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cdc.capture.schema_tracker import CaptureFilter, SchemaTracker
from cdc.pgoutput.decoder_events import RelationSeen
from cdc.position import Position
from cdc.table import REMOVED, TableSchema, TableState
from tests.pgoutput.streams import ORDERS, relation

FILTER = CaptureFilter(dsn="", publication="", patterns=("shop.*",), exclude=("shop.audit",))


def tracker_of(*known: TableSchema) -> SchemaTracker:
    return SchemaTracker(FILTER, {schema.relation: schema for schema in known}, 0)


@pytest.fixture(name="tracker")
def _tracker() -> Iterator[SchemaTracker]:
    tracker = tracker_of(ORDERS)
    yield tracker
    tracker.close()


def ddl(command: str, **fields: object) -> bytes:
    return json.dumps({"oid": ORDERS.oid, "command": command, **fields}).encode()


@pytest.mark.parametrize(("schema", "name"), [("other", "orders"), ("shop", "audit")])
def test_a_relation_that_no_rule_matches_is_not_captured(schema: str, name: str) -> None:
    message = relation(replace(ORDERS, schema=schema, name=name))
    assert tracker_of().resolve_relation(RelationSeen(message, Position(5), 1)) is None


def test_a_table_that_was_removed_is_not_captured() -> None:
    removed = ORDERS.flagged(TableState.DROPPED, REMOVED)
    assert tracker_of(removed).resolve_relation(RelationSeen(relation(ORDERS), Position(5), 1)) is None


def test_a_ddl_message_marks_a_dropped_table(tracker: SchemaTracker) -> None:
    (schema,) = tracker.apply_ddl(ddl("DROP TABLE", dropped=True))
    assert (schema.state, schema.reason) == (TableState.DROPPED, "the source dropped the table: DROP TABLE")
    assert list(tracker.apply_ddl(ddl("DROP TABLE", dropped=True))) == []


def test_a_ddl_message_about_a_rewrite_of_values_marks_the_table_for_a_resync(tracker: SchemaTracker) -> None:
    (schema,) = tracker.apply_ddl(ddl("ALTER TABLE", rewrite=4))
    assert schema.state is TableState.NEEDS_RESYNC
    assert "ALTER TABLE rewrote the table" in (schema.reason or "")


@pytest.mark.parametrize("content", [b"{", ddl("ALTER TABLE"), json.dumps({"oid": 99, "command": "DROP"}).encode()])
def test_a_ddl_message_that_concerns_no_known_table_changes_nothing(tracker: SchemaTracker, content: bytes) -> None:
    assert list(tracker.apply_ddl(content)) == []
