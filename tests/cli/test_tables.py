"""`cdc tables add`, `remove`, `skip`: the definition says what is captured, and the running reader what came of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from cdc.catalog import Catalog, ProcessReport
from cdc.catalog.commands import CommandState
from cdc.config import load_definition
from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest
from cdc.snapshot.reader_commands import CHECK_TABLES, SKIP_TABLES
from cdc.table import TableState
from tests.cli.command import Outcome
from tests.cli.test_backfill import Command
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.snapshot.reader_with_backfills import Running
from tests.snapshot.test_skip import lose_changes

LATER = "no reader is running"


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY)")
    held = Captured(tmp_path, database, tables="public.t")
    held.copy()
    return held


@pytest.fixture(name="catalog")
def _catalog(held: Captured) -> Iterator[Catalog]:
    with Catalog.open(held.definition.catalog.url) as catalog:
        yield catalog


@pytest.fixture(name="cdc")
def _cdc(held: Captured, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(held, capsys)


@pytest.fixture(name="reading")
def _reading(held: Captured, catalog: Catalog) -> Iterator[Running]:
    """A reader that streams, and reports as often as the real one."""
    stop = Event()

    def report() -> None:
        while not stop.wait(0.5):
            catalog.processes.report(ProcessReport("held", "reader", os.getpid(), "running"))

    with Running(held) as running:
        catalog.processes.report(ProcessReport("held", "reader", os.getpid(), "running"))
        reporter = Thread(target=report)
        reporter.start()
        try:
            yield running
        finally:
            stop.set()
            reporter.join()


def envelope_of(outcome: Outcome) -> dict[str, Any]:
    """The one line that is no log line of the reader beside it."""
    (found,) = (line for line in outcome.output.splitlines() if line.startswith("{"))
    envelope: dict[str, Any] = json.loads(found)
    return envelope


def test_without_a_reader_the_file_changes_and_the_rest_comes_at_its_start(
    held: Captured, cdc: Command, catalog: Catalog
) -> None:
    told = cdc("tables", "add", "public.u")
    assert (told.status, LATER in told.output) == (0, True)
    assert load_definition(held.path).patterns == ["public.t", "public.u"]
    again = cdc("tables", "add", "public.u", "--json").envelope
    assert (again["ok"], again["result"]["written"], again["summary"][:13]) == (True, False, "nothing to do")
    assert cdc("tables", "remove", "public.u").status == 0
    assert load_definition(held.path).patterns == ["public.t"]
    assert [line.action for line in catalog.audit.ls()] == ["tables remove", "tables add"]
    assert catalog.commands.ls("held", CHECK_TABLES) == []


WRONG = [
    ("add", "u"),
    ("remove", "public.t"),
    ("skip", "public.none"),
    ("skip", "public.t"),
]


def test_a_dry_run_and_what_cannot_be_done_change_nothing(held: Captured, cdc: Command, catalog: Catalog) -> None:
    before = held.path.read_bytes()
    for arguments in WRONG:
        outcome = cdc("tables", *arguments)
        assert (outcome.status, "→" in outcome.errors) == (2, True), arguments
        assert held.path.read_bytes() == before
    assert (catalog.audit.ls(), catalog.commands.ls("held", SKIP_TABLES)) == ([], [])
    told = cdc("tables", "add", "public.u", "far.away", "--dry-run")
    assert "match: far.away" in told.output
    assert "the source has no table far.away" in told.output
    result = cdc.result("tables", "remove", "public.t*", "--dry-run")
    assert ("public.t*" in result["diff"], result["written"]) == (True, False)
    assert held.path.read_bytes() == before
    assert catalog.audit.ls() == []


def test_a_table_that_is_added_is_captured_and_one_that_is_removed_let_go(
    held: Captured, cdc: Command, reading: Running
) -> None:
    added = envelope_of(cdc("tables", "add", "public.u", "far.away", "--json"))["result"]
    assert (added["reader"]["added"], added["absent"]) == (["public.u"], ["far.away"])
    reading.until(lambda: (c := reading.catalog.commands.ls("held", BACKFILL)) and c[0].state is CommandState.DONE)
    run_sql(held.dsn, "INSERT INTO u VALUES (1)")
    reading.caught_up()
    assert held.folded("u") == [("1",)]
    told = cdc("tables", "remove", "public.u")
    assert (told.status, "public.u: no longer captured" in told.output) == (0, True)
    assert {s.topic: s.state for s in held.log.schemas().values()}["public.u"] is TableState.DROPPED


def test_a_dropped_table_is_listed_until_it_is_removed(held: Captured, cdc: Command, reading: Running) -> None:
    def listed() -> dict[str, str]:
        tables = envelope_of(cdc("tables", "ls", "--json"))["result"]["tables"]
        return {table["topic"]: table["state"] for table in tables}

    run_sql(held.dsn, "CREATE TABLE temporary (id int PRIMARY KEY)")
    assert cdc("tables", "add", "public.temporary").status == 0
    run_sql(held.dsn, "DROP TABLE temporary")
    reading.ended(reading.catalog.commands.post("held", CHECK_TABLES, {}))
    assert listed()["public.temporary"] == "dropped"
    told = cdc("tables", "ls").output
    assert "the source no longer has" in told
    assert "'cdc tables remove public.temporary -c " in told
    assert not [p for p in envelope_of(cdc("status", "--json"))["result"]["problems"] if "temporary" in p["subject"]]
    assert cdc("tables", "remove", "public.temporary").status == 0
    assert "public.temporary" not in listed()


def test_a_table_that_the_reader_refuses_is_a_finding_with_the_reason_until_it_is_captured(
    held: Captured, cdc: Command, reading: Running
) -> None:
    run_sql(held.dsn, "CREATE TABLE bare (id int)")
    told = cdc("tables", "add", "public.bare", "public.u")
    assert told.status == 4
    assert "public.bare: CDC-2002 has no primary key" in told.output
    assert "public.u: published" in told.output
    envelope = envelope_of(cdc("tables", "add", "public.bare*", "--json"))
    assert (envelope["ok"], list(envelope["result"]["reader"]["refused"])) == (False, ["public.bare"])

    # the rules match it already
    again = cdc("tables", "add", "public.bare")
    assert (again.status, 'ALTER TABLE "public"."bare" REPLICA IDENTITY FULL;' in again.output) == (4, True)
    listed = {table["topic"]: table for table in envelope_of(cdc("tables", "ls", "--json"))["result"]["tables"]}
    assert (listed["public.bare"]["state"], "no primary key" in listed["public.bare"]["reason"]) == ("refused", True)
    status = envelope_of(cdc("status", "--json"))["result"]
    (problem,) = (found for found in status["problems"] if found["subject"] == "table public.bare")
    assert (problem["code"], problem["remedy"]) == ("CDC-2002", 'ALTER TABLE "public"."bare" REPLICA IDENTITY FULL;')
    run_sql(held.dsn, "ALTER TABLE bare ADD PRIMARY KEY (id)")
    assert cdc("tables", "add", "public.bare").status == 0
    assert {table.state for table in reading.catalog.tables.ls("held")} == set()


def test_a_table_in_doubt_is_skipped_but_not_while_a_copy_of_it_is_on_its_way(
    held: Captured, cdc: Command, catalog: Catalog
) -> None:
    lose_changes(held)
    job = catalog.commands.post("held", BACKFILL, BackfillRequest(("public.*",), resync=True).to_json())
    refused = cdc("tables", "skip", "public.t")
    assert (refused.status, f"cdc backfill cancel {job}" in refused.errors) == (2, True)
    catalog.commands.finish(job, {"state": "cancelled"}, ok=False)
    assert cdc.result("tables", "skip", "t")["tables"] == ["public.t"]
    (asked,) = catalog.commands.pending("held", SKIP_TABLES)
    with Running(held) as running:
        assert running.ended(asked.id).result == {"skipped": ["public.t"]}
    assert [schema.state for schema in held.log.schemas().values()] == [TableState.LIVE]
    assert cdc("tables", "skip", "public.t").status == 2


def test_a_resync_without_a_reader_says_that_it_waits_for_one(cdc: Command) -> None:
    asked = cdc("tables", "resync", "public.t")
    assert (asked.status, asked.output.splitlines()[0]) == (
        0,
        "⚠ backfill 1: 1 tables, queued; no reader is running: the backfill starts when a reader runs",
    )
    assert "no reader is running" not in cdc("backfill", "ls").output
    assert "the reader is missing" in cdc("backfill", "cancel", "1").output


def test_a_resync_of_a_running_reader_says_that_it_is_done_and_fails_where_the_backfill_does(
    held: Captured, cdc: Command, reading: Running
) -> None:
    run_sql(held.dsn, "INSERT INTO t VALUES (11, 'eleven')")
    result = envelope_of(cdc("tables", "resync", "public.t", "--wait", "--json"))["result"]
    assert (result["state"], result["reader"], result["rows"]) == ("done", "running", 1)
    assert reading.reads
    failed = cdc("backfill", "public.t", "--where", "1 / (id - id) > 0", "--wait", "--json")
    found = envelope_of(failed)
    assert (failed.status, found["ok"]) == (1, False)
    assert found["error"]["message"].startswith("backfill 2 failed: division by zero")
