"""A row that the server can neither decode nor send: what it stops, what it leaves alone, and its remedies."""

from __future__ import annotations

import re
import shlex
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, LiteralString

import pytest

from cdc.catalog import Catalog, CommandState, ProcessReport
from cdc.errors import COMMAND, UndecodableWal, UnreadableRow, complete_remedy
from cdc.postgres.connection import connect
from cdc.service.status import pipeline_status
from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest
from cdc.table import TableState
from tests.cli.command import Outcome, spawn
from tests.faults.capture import Captured, ReaderProcess
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until

PERMANENT_WITHIN = 60.0
LARGE: LiteralString = (
    "(SELECT string_agg(convert_to(repeat(repeat('x', 9000), 10000), 'UTF8'), '') FROM generate_series(1, 6))"
)
"""A bytea of 540 MB: 1.08 GB as text, more than the server allocates."""
MANY_BITS: LiteralString = (
    "(SELECT b || b || b || b || b FROM (SELECT a || a || a AS b FROM (SELECT 0::bit(72000000) AS a) x) y)"
)
"""As many characters as text, in 135 MB, which the server makes, compresses and reads in a quarter of the time."""


def captured(folder: Path, dsn: str, table: LiteralString, first: LiteralString, large: LiteralString) -> Captured:
    """A log behind which a transaction with a value waits that the server cannot turn into text."""
    run_sql(
        dsn,
        table,
        "CREATE TABLE u (id int PRIMARY KEY)",
        f"INSERT INTO t VALUES (1, {first})",
        "INSERT INTO u VALUES (1)",
    )
    held = Captured(folder, dsn)
    held.copy()
    with held.reading() as reading:
        reading.caught_up()
    run_sql(dsn, f"INSERT INTO t VALUES (2, {large})", "INSERT INTO u VALUES (2)")
    return held


def last_report(held: Captured) -> ProcessReport | None:
    with Catalog.open(held.definition.catalog.url) as catalog:
        return next((report for report in catalog.processes.ls("held") if report.process == "reader"), None)


def commands(remedy: str, held: Captured) -> list[str]:
    """Those that an error names, as they can be copied."""
    return [match[1] for match in COMMAND.finditer(complete_remedy(remedy, file=str(held.path)))]


def carry_out(command: str, *more: str) -> Outcome:
    return spawn(*shlex.split(command)[1:], *more)


def copy_failure(held: Captured, topic: str, code: str) -> tuple[str, str] | None:
    """Message and remedy of a table's problem."""
    with Catalog.open(held.definition.catalog.url) as catalog:
        found = pipeline_status(catalog, "held", datetime.now(UTC)).problems
    return next(((p.message, p.remedy) for p in found if (p.subject, p.code) == (f"table {topic}", code)), None)


def finding(dsn: str, remedy: str) -> list[tuple[Any, ...]]:
    """What the statement in the remedy finds."""
    statement = re.search(r"\(find it: (SELECT .*?\d)\)", remedy)
    assert statement is not None, remedy
    with connect(dsn) as conn:
        return conn.execute(statement[1].encode()).fetchall()


def no_copy_follows(held: Captured, reader: ReaderProcess) -> None:
    """A copy that is to be made again is asked for before the next backfill is carried out: there is none."""
    with Catalog.open(held.definition.catalog.url) as catalog:
        other = catalog.commands.post("held", BACKFILL, BackfillRequest(("public.u",)).to_json())
        until(lambda: (done := catalog.commands.get(other)) and done.state is CommandState.DONE, reader.output)
        requests = [BackfillRequest.from_json(command.payload) for command in catalog.commands.ls("held", BACKFILL)]
    assert [request.tables for request in requests if request.resync] == [("*",)]


def state_of(held: Captured, topic: str) -> TableState:
    return next(schema.state for schema in held.log.schemas().values() if schema.topic == topic)


@pytest.mark.slow
def test_an_undecodable_transaction_fails_the_reader_and_each_remedy_leads_past_it(
    tmp_path: Path, database: str
) -> None:
    """The reader fails at the transaction, then the copy of its table fails at the row; every command is printed."""
    held = captured(tmp_path, database, "CREATE TABLE t (id int PRIMARY KEY, v bytea)", "'one'", LARGE)
    began = time.monotonic()
    with ReaderProcess(held) as reader:
        assert reader.child.wait(PERMANENT_WITHIN) != 0, reader.output()
    assert time.monotonic() - began < PERMANENT_WITHIN
    report = last_report(held)
    assert report is not None
    error = report.error or {}
    assert (report.state, error["code"]) == ("failed", UndecodableWal.code)
    assert held.slot in error["message"]
    assert re.search(r"is at [0-9A-F]+/[0-9A-F]+, the log is at", error["message"])

    skip, resync = commands(error["suggestion"], held)
    assert carry_out(skip, "--yes").status == 0
    with ReaderProcess(held) as reader:
        assert carry_out(resync).status == 0, reader.output()
        run_sql(held.dsn, "INSERT INTO u VALUES (3)")
        until(lambda: held.folded("u") == [("1",), ("2",), ("3",)], reader.output)
        message, remedy = until(lambda: copy_failure(held, "public.t", UnreadableRow.code), reader.output)
        assert "the server cannot send a row of 'public.t'" in message
        no_copy_follows(held, reader)

        ((found,),) = finding(held.dsn, remedy)
        run_sql(held.dsn, f"UPDATE t SET v = 'two' WHERE id = {int(found)}")
        assert commands(remedy, held)[0] == (again := f"cdc tables resync public.t -c {shlex.quote(str(held.path))}")
        assert carry_out(again).status == 0
        until(lambda: held.folded("t") == [("1", r"\x6f6e65"), ("2", r"\x74776f")], reader.output)


def test_a_new_epoch_begins_although_rows_of_two_tables_cannot_be_copied(tmp_path: Path, database: str) -> None:
    held = captured(tmp_path, database, "CREATE TABLE t (id int PRIMARY KEY, v varbit)", "B'1'", MANY_BITS)
    run_sql(database, "CREATE TABLE s (LIKE t INCLUDING INDEXES)", "INSERT INTO s TABLE t")
    done = carry_out(f"cdc slots recover -c {shlex.quote(str(held.path))} --new-epoch --yes --json")
    assert done.status == 0, done.output
    assert done.envelope["result"]["copied_by_reader"] == ["public.s", "public.t"]
    with ReaderProcess(held) as reader:
        until(lambda: copy_failure(held, "public.t", UnreadableRow.code), reader.output)
        run_sql(held.dsn, "INSERT INTO u VALUES (3)")
        until(lambda: held.folded("u") == [("1",), ("2",), ("3",)], reader.output)
    assert state_of(held, "public.t") is TableState.SNAPSHOTTING
    assert state_of(held, "public.u") is TableState.LIVE
