"""How a process ends: its last report has the reason, in whatever order failure, verdict and signal come."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.capture.reader_process import exit_error
from cdc.capture.resume_checks import lsn_to_confirm
from cdc.catalog import Catalog, ProcessReport, TableProgress
from cdc.errors import (
    CatalogUnusable,
    ExitCode,
    LogCorrupt,
    PublicationNarrowed,
    SlotInUse,
    SlotMissing,
    SourceUnreachable,
)
from cdc.postgres.connection import connect
from cdc.postgres.replication import ReplicationStream, StreamOptions
from cdc.postgres.slot import drop_slot, slot_status
from tests.cli.command import run, spawn
from tests.faults.capture import Captured, ReaderProcess, SupervisedReader
from tests.fixtures import forked
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import PATIENCE, until


@pytest.fixture(name="held")
def _held(tmp_path: Path, either_database: str) -> Captured:
    run_sql(either_database, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    held = Captured(tmp_path, either_database)
    held.copy()
    return held


def last_report(held: Captured) -> ProcessReport | None:
    with Catalog.open(held.definition.catalog.url) as catalog:
        return next((report for report in catalog.processes.ls("held") if report.process == "reader"), None)


def reports(held: Captured, state: str) -> bool:
    report = last_report(held)
    return report is not None and report.state == state


def is_read(held: Captured) -> bool:
    with connect(held.dsn) as conn:
        found = slot_status(conn, held.slot)
    return found is not None and found.active


def ended_with(held: Captured) -> tuple[str, str]:
    """State and code of the last report."""
    report = last_report(held)
    assert report is not None
    return report.state, (report.error or {}).get("code", "")


@pytest.mark.slow
def test_a_verdict_of_the_reporter_is_in_the_last_report(held: Captured, capsys: pytest.CaptureFixture[str]) -> None:
    with ReaderProcess(held) as reader:
        until(lambda: reports(held, "running") and is_read(held), reader.output)
        run_sql(held.dsn, "ALTER PUBLICATION cdc_held_pub DROP TABLE u")
        assert reader.child.wait(PATIENCE) != 0, reader.output()
    assert ended_with(held) == ("failed", PublicationNarrowed.code)
    assert PublicationNarrowed.code in run(capsys, "status", "-c", held.path).output


def test_a_failure_of_the_reader_is_in_the_last_report(held: Captured) -> None:
    with connect(held.dsn) as conn:
        drop_slot(conn, held.slot)
    with ReaderProcess(held) as reader:
        assert reader.child.wait(PATIENCE) != 0, reader.output()
    assert ended_with(held) == ("failed", SlotMissing.code)


def test_a_reader_that_is_stopped_while_it_waits_keeps_the_reason(held: Captured) -> None:
    options = StreamOptions(slot=held.slot, publication="cdc_held_pub", start=lsn_to_confirm(0))
    with ReplicationStream.open(held.dsn, options), ReaderProcess(held) as reader:
        until(lambda: reports(held, "waiting"), reader.output)
        reader.child.terminate()
        assert reader.child.wait(PATIENCE) == 0, reader.output()
    assert ended_with(held) == ("stopped", SlotInUse.code)


def test_a_signal_between_the_failure_and_the_end_takes_nothing_away(held: Captured) -> None:
    with ReaderProcess(held) as reader:
        until(lambda: reports(held, "running") and is_read(held), reader.output)
        run_sql(held.dsn, "ALTER PUBLICATION cdc_held_pub DROP TABLE u")
        until(lambda: reports(held, "failed") or reader.child.poll() is not None, reader.output)
        reader.child.terminate()
        assert reader.child.wait(PATIENCE) != 0, reader.output()
    assert ended_with(held) == ("failed", PublicationNarrowed.code)


@pytest.mark.parametrize(
    ("verdict", "failure", "expected"),
    [
        (PublicationNarrowed("x"), None, PublicationNarrowed),
        (PublicationNarrowed("x"), SourceUnreachable("x"), PublicationNarrowed),
        (PublicationNarrowed("x"), LogCorrupt("x"), PublicationNarrowed),
        (None, LogCorrupt("x"), LogCorrupt),
        (None, ZeroDivisionError(), ZeroDivisionError),
        (None, SourceUnreachable("x"), type(None)),
        (None, None, type(None)),
    ],
)
def test_the_outcome_is_the_verdict_then_the_failure_that_no_retry_repairs(
    verdict: PublicationNarrowed | None, failure: Exception | None, expected: type
) -> None:
    assert type(exit_error(verdict, failure)) is expected


LATE = """
import sys
from types import SimpleNamespace
from cdc import errors
from cdc.capture.reader_process import exit_late
exit_late(SimpleNamespace(verdict=getattr(errors, sys.argv[1])("x") if sys.argv[1] else None))
"""


@pytest.mark.parametrize(
    ("verdict", "status"),
    [("", ExitCode.OK), ("PublicationNarrowed", ExitCode.HALTED), ("LogFenced", ExitCode.RUNTIME)],
)
def test_a_process_whose_end_takes_too_long_ends_with_the_status_of_its_verdict(verdict: str, status: ExitCode) -> None:
    assert forked.run("tests.run_code", LATE, verdict).status == status


def copied_rows(held: Captured) -> dict[str, int]:
    with Catalog.open(held.definition.catalog.url) as catalog:
        return {table.topic: table.rows for table in catalog.tables.ls("held") if not table.sink}


def test_a_reader_that_drained_well_says_stopped_and_a_backfill_without_rows_leaves_the_count_of_copied_rows(
    held: Captured,
) -> None:
    """The count stands in the catalog since before a restart."""
    with Catalog.open(held.definition.catalog.url) as catalog:
        copied = TableProgress("", "public.t", "streaming", None, int(held.log.durable or 0), None, 20_000)
        catalog.tables.record("held", [copied])
    with ReaderProcess(held) as reader:
        until(lambda: reports(held, "running") and is_read(held), reader.output)
        done = spawn("backfill", "public.t", "--where", "false", "--wait", "-c", held.path)
        assert done.status == 0, done.errors
        reader.child.terminate()
        assert reader.child.wait(PATIENCE) == 0, reader.output()
    assert ended_with(held) == ("stopped", "")
    assert copied_rows(held)["public.t"] == 20_000


def test_under_cdc_run_a_failed_reader_waits_for_a_person_and_runs_again_after_the_remedy(held: Captured) -> None:
    with SupervisedReader(held) as supervised:
        until(lambda: reports(held, "running") and is_read(held), supervised.output)
        run_sql(held.dsn, "ALTER PUBLICATION cdc_held_pub DROP TABLE u")
        until(lambda: "ended with status 5" in supervised.output(), supervised.output)
        assert ended_with(held) == ("failed", PublicationNarrowed.code)
        run_sql(held.dsn, "ALTER PUBLICATION cdc_held_pub ADD TABLE u")
        assert spawn("slots", "recover", "--new-epoch", "--yes", "-c", held.path).status == 0
        until(lambda: reports(held, "running") and is_read(held), supervised.output)
        assert supervised.output().count("ended with status") == 1
        supervised.child.terminate()
        assert supervised.child.wait(PATIENCE) == 0


def test_a_damaged_catalog_stops_no_reader_and_its_remedy_works(held: Captured) -> None:
    file = held.folder / "catalog.db"
    file.write_bytes(b"not a database at all" * 400)
    refused = spawn("status", "-c", held.path, "--json")
    error = refused.envelope["error"]
    assert (refused.status, error["code"]) == (3, CatalogUnusable.code), refused
    assert str(file) in error["suggestion"]
    with ReaderProcess(held) as reader:
        until(lambda: is_read(held) or reader.child.poll() is not None, reader.output)
        assert reader.child.poll() is None, reader.output()
        run_sql(held.dsn, "INSERT INTO t VALUES (1)")
        until(lambda: held.folded("t") == [("1",)], reader.output)
        assert reader.child.poll() is None
    for end in ("", "-wal", "-shm"):
        moved = file.with_name(f"catalog.db{end}")
        if moved.exists():
            moved.rename(held.folder / f"moved{end}")
    with ReaderProcess(held) as reader:
        until(lambda: reports(held, "running") and set(copied_rows(held)) == {"public.t", "public.u"}, reader.output)
