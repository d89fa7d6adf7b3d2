"""What the reader's status shows of tables that the log marks, and of WAL that the server cannot decode."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from tenacity import Retrying, stop_after_attempt

from cdc import metrics
from cdc.capture.reader import ReaderStart
from cdc.capture.reader_monitor import StatusReporter, add_positions, inexact_tables
from cdc.catalog import Catalog, TableProgress
from cdc.errors import SourceError, SourceUnreachable
from cdc.position import Position
from cdc.postgres.sqlstate import classify_message
from cdc.table import ReplicaIdentity, TableSchema, TableState
from tests.faults.capture import Captured, capture_table
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until

LIVE = TableSchema(relation=7, oid=7, schema="shop", name="t", replica_identity=ReplicaIdentity.DEFAULT, columns=())
SHOWN = TableProgress("", "shop.t", "streaming", None, 1, None, 50)


def test_a_marked_table_is_shown_with_its_reason_and_keeps_its_count() -> None:
    marked = LIVE.flagged(TableState.NEEDS_RESYNC, "why")

    assert inexact_tables([marked], [SHOWN, replace(SHOWN, sink="lake")], 9) == [
        replace(SHOWN, state="needs_resync", reason="why", position=9)
    ]
    assert inexact_tables([marked], [], 9)[0].state == "needs_resync"


def test_a_table_that_streams_is_left_alone_and_one_that_streams_again_is_shown_so() -> None:
    assert inexact_tables([LIVE], [SHOWN], 9) == []
    assert inexact_tables([LIVE], [replace(SHOWN, state="needs_resync", reason="why")], 9) == [
        replace(SHOWN, position=9)
    ]


def test_a_table_that_is_being_copied_is_shown_so_until_the_log_says_otherwise() -> None:
    copied = LIVE.flagged(TableState.SNAPSHOTTING, "its rows are being copied")
    (shown,) = inexact_tables([copied], [], 9)

    assert (shown.state, shown.rows) == ("snapshotting", 0)
    assert inexact_tables([LIVE], [shown], 12) == [replace(shown, state="streaming", reason=None, position=12)]


def test_a_successor_of_a_dropped_table_is_shown_in_its_place() -> None:
    gone, successor = LIVE.flagged(TableState.DROPPED, "gone"), replace(LIVE, relation=8, oid=8)

    assert inexact_tables([gone, successor], [SHOWN], 9) == inexact_tables([successor, gone], [SHOWN], 9) == []
    assert inexact_tables([gone], [SHOWN], 9)[0].state == "dropped"


def test_a_table_that_is_refused_is_shown_so_until_it_is_captured() -> None:
    refused = replace(SHOWN, state="refused", reason="why")

    assert inexact_tables([LIVE.flagged(TableState.DROPPED, "removed before")], [refused], 9) == []
    assert inexact_tables([LIVE], [refused], 9) == [replace(SHOWN, position=9)]


def test_a_renamed_table_is_listed_under_its_present_name_only(tmp_path: Path, database: str) -> None:
    run_sql(database, "CREATE TABLE t_new (id int PRIMARY KEY)")
    captured = capture_table(tmp_path, database)
    assert reported_topics(captured) == {"public.t", "public.t_new"}

    run_sql(database, "ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t")
    run_sql(database, "INSERT INTO t VALUES (1)", "INSERT INTO t_old VALUES (1)")
    captured.stream()
    assert reported_topics(captured) == {"public.t", "public.t_old"}


def reported_topics(captured: Captured) -> set[str]:
    """The tables at the source that the catalog has after a report of a reader that copied `t` and `t_new`."""
    definition, figures = captured.definition, metrics.Metrics()
    figures.set(metrics.LOG_POSITION, int(captured.log.durable or 0), definition.name)
    for topic in ("public.t", "public.t_new"):
        figures.add(metrics.SNAPSHOT_ROWS, 1, definition.name, topic)
    StatusReporter(definition, figures, Event()).close()
    with Catalog.open(definition.catalog.url) as catalog:
        return {table.topic for table in catalog.tables.ls(definition.name)}


@pytest.mark.parametrize(
    ("reason", "begins"),
    [
        (
            "invalid memory alloc request size 1073741824",
            "make the value or row smaller at the source, because a bytea",
        ),
        ("unexpected chunk number 2", "stop the reader, run 'cdc slots recover"),
    ],
)
def test_the_remedy_of_wal_that_cannot_be_decoded_has_only_commands_that_can_be_copied(
    tmp_path: Path, database: str, reason: str, begins: str
) -> None:
    refused = classify_message("XX000", reason)
    assert isinstance(refused, SourceError)
    found = add_positions(refused, capture_table(tmp_path, database).definition)

    assert found.fix.startswith(begins)
    skip, resync = re.findall(r"'(cdc [^']*)'", found.fix)
    assert re.fullmatch(r'cdc slots recover -c \S+ --skip-to [0-9A-F]+/[0-9A-F]+ --resync "\*"', skip)
    assert resync == 'cdc tables resync "*"'


def test_the_lag_grows_while_there_is_no_stream_and_is_the_last_one_when_the_stream_begins_again(
    tmp_path: Path, database: str
) -> None:
    definition, figures = capture_table(tmp_path, database).definition, metrics.Metrics()
    reporter = StatusReporter(definition, figures, Event())

    def lag() -> float:
        return figures.value(metrics.SOURCE_LAG_SECONDS, definition.name) or 0.0

    def refuse() -> None:
        raise SourceUnreachable("no answer")

    attempts = Retrying(
        stop=stop_after_attempt(2), before_sleep=reporter.report_waiting, sleep=lambda _: None, reraise=True
    )
    figures.set(metrics.SOURCE_LAG_SECONDS, 0.08, definition.name)
    reporter.start()
    try:
        with pytest.raises(SourceUnreachable):
            attempts(refuse)
        until(lambda: lag() > 1.0, "a lag that grows")
        reporter.report_started(ReaderStart(Position(1), None, 0.0))
        assert lag() == 0.08
    finally:
        reporter.close()


def test_a_reader_that_starts_without_its_source_is_as_late_as_the_last_transaction_of_its_log(
    tmp_path: Path, database: str
) -> None:
    captured = capture_table(tmp_path, database)
    committed_at = captured.log.last_commit.committed_at if captured.log.last_commit else 0
    figures = metrics.Metrics()
    reporter = StatusReporter(captured.definition, figures, Event())

    def refuse() -> None:
        raise SourceUnreachable("no answer")

    with pytest.raises(SourceUnreachable):
        Retrying(stop=stop_after_attempt(2), before_sleep=reporter.report_waiting, sleep=lambda _: None, reraise=True)(
            refuse
        )
    reporter.close()
    found = figures.value(metrics.SOURCE_LAG_SECONDS, captured.definition.name)
    assert found is not None
    assert 0 < found <= time.time() - committed_at / 1e6
