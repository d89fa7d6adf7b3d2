"""Schema tracker: relations that are not captured, DDL messages, and checks of the catalog that find a change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from cdc.capture.reader_monitor import READ_SCHEMAS_EVERY, REPORT_EVERY
from cdc.capture.schema_tracker import CATALOG_CHECK_EVERY, CaptureFilter, SchemaTracker
from cdc.config.source import Source
from cdc.pgoutput.decoder_events import RelationSeen
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.ddl_messages import trigger_script
from cdc.postgres.publication import ensure_publication, published_schema
from cdc.postgres.tables import match_tables
from cdc.table import REMOVED, TableSchema, TableState
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until
from tests.pgoutput.streams import ORDERS, relation

Applied = Callable[[bytes], list[TableSchema]]
FILTER = CaptureFilter(dsn="", publication="", patterns=("shop.*",), exclude=("shop.audit",))


def tracker_of(*known: TableSchema) -> SchemaTracker:
    return SchemaTracker(FILTER, {schema.relation: schema for schema in known}, 0)


@pytest.fixture(name="applied")
def _applied(database: str) -> Iterator[Applied]:
    """Returns the versions that follow from a DDL message with the key of the triggers; a tracker knows ORDERS."""
    run_sql(database, trigger_script("install"))
    ((key,),) = rows_of(database, "SELECT key FROM cdc_source.message_key")
    tracker = SchemaTracker(replace(FILTER, dsn=database), {ORDERS.relation: ORDERS}, 0)
    yield lambda content: list(tracker.apply_ddl(key.encode() + b" " + content))
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


def test_a_ddl_message_marks_a_dropped_table(applied: Applied) -> None:
    (schema,) = applied(ddl("DROP TABLE", dropped=True))
    assert (schema.state, schema.reason) == (TableState.DROPPED, "the source dropped the table: DROP TABLE")
    assert applied(ddl("DROP TABLE", dropped=True)) == []


def test_a_ddl_message_about_a_rewrite_of_values_marks_the_table_for_a_resync(applied: Applied) -> None:
    (schema,) = applied(ddl("ALTER TABLE", rewrite=4))
    assert schema.state is TableState.NEEDS_RESYNC
    assert "ALTER TABLE rewrote the table" in (schema.reason or "")


def test_a_ddl_message_that_concerns_no_known_table_changes_nothing(applied: Applied) -> None:
    for content in (b"{", ddl("ALTER TABLE"), json.dumps({"oid": 99, "command": "DROP"}).encode()):
        assert applied(content) == []


def test_a_flood_of_messages_without_the_key_is_one_query_and_one_log_message(database: str) -> None:
    run_sql(database, trigger_script("install"))
    tracker = SchemaTracker(replace(FILTER, dsn=database), {ORDERS.relation: ORDERS}, 0)
    forged = b"0" * 72 + b" " + ddl("DROP TABLE", dropped=True)
    with capture_logs() as lines:
        assert list(tracker.apply_ddl(forged)) == []
        tracker.close()
        assert not any(tracker.is_authentic(forged) for _ in range(10_000))
    assert len(lines) == 1


def test_each_call_applies_a_check_of_the_catalog_that_began_without_a_call(database: str) -> None:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY)")
    with connect(database) as conn:
        ((oid, name),) = match_tables(conn, ["public.t"])
        ensure_publication(conn, "pub", [name])
        table = published_schema(conn, oid, "pub")
    assert table is not None
    capture_filter = CaptureFilter(dsn=database, publication="pub")
    tracker = SchemaTracker(capture_filter, {table.relation: table}, 0, check_every=0.0)

    def next_check() -> list[str]:
        until(lambda: tracker.has_check_result, "the end of a check of the catalog")
        return [version.topic for version in tracker.detect_drift()]

    list(tracker.detect_drift())  # begins the first one
    next_check()
    run_sql(database, "ALTER TABLE t RENAME TO renamed")
    topics = [*next_check(), *next_check()]  # the first of them may have begun before the table was renamed
    tracker.close()
    assert topics == ["public.renamed"]


def test_a_catalog_check_and_a_heartbeat_show_a_renamed_table_within_thirty_seconds() -> None:
    heartbeat = Source.model_fields["heartbeat"].default + REPORT_EVERY  # the reporter's thread sends it
    assert CATALOG_CHECK_EVERY + heartbeat + READ_SCHEMAS_EVERY + REPORT_EVERY <= 30
