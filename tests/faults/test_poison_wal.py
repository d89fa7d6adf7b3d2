"""WAL that the server cannot decode: the reader stops at its place, and the documented way out leads past it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from cdc.catalog import Catalog
from cdc.errors import PublicationReplaced, StateConflict, UndecodableWal
from cdc.failpoint import VARIABLE
from cdc.log.epoch_and_slot_records import PendingEpoch, write_pending_epoch
from cdc.table import TableState
from tests.cli.command import run, spawn
from tests.faults.capture import Captured, ReaderProcess
from tests.fixtures.forked import start
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import PATIENCE, until


@pytest.fixture(name="held")
def _held(tmp_path: Path, either_database: str) -> Captured:
    """A log behind which a transaction waits that cannot be decoded, and one that can."""
    run_sql(
        either_database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE x (id int PRIMARY KEY) WITH (user_catalog_table = true)",
        "INSERT INTO t VALUES (1, 'one')",
    )
    held = Captured(tmp_path, either_database)
    held.copy()
    run_sql(either_database, "INSERT INTO t VALUES (2, 'two')")
    held.stream()
    run_sql(either_database, "INSERT INTO x VALUES (1)", "DROP TABLE x", "UPDATE t SET v = 'lost' WHERE id = 2")
    return held


def wal_end(dsn: str) -> str:
    ((end,),) = rows_of(dsn, "SELECT pg_current_wal_lsn()::text")
    return str(end)


def test_it_stops_the_reader_and_moves_nothing_and_no_other_place_can_be_skipped_to(
    held: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    before = held.log.durable
    with pytest.raises(UndecodableWal, match=r"could not find pg_class entry.*XX000"):
        held.stream()
    for lsn in ("0/1", "FFFF/0"):  # before the slot, behind the end of the WAL
        done = run(capsys, "slots", "recover", "-c", held.path, "--skip-to", lsn, "--resync", "*", "--yes")
        assert done.status == 2
        assert "→" in done.errors
    assert held.log.durable == before


def test_the_way_out_skips_it_marks_the_tables_and_says_so(held: Captured, capsys: pytest.CaptureFixture[str]) -> None:
    lsn = wal_end(held.dsn)
    done = run(capsys, "slots", "recover", "-c", held.path, "--skip-to", lsn, "--resync", "*.t", "--yes", "--json")
    assert done.envelope["result"]["marked"] == ["public.t"]
    run_sql(held.dsn, "INSERT INTO t VALUES (3, 'three')")
    held.stream()

    (table,) = (s for s in held.log.schemas().values() if s.name == "t")
    assert table.state is TableState.NEEDS_RESYNC
    assert "an operator skipped" in (table.reason or "")
    assert ("3", "three") in held.folded("t")
    with Catalog.open(held.definition.catalog.url) as catalog:
        (line,) = catalog.audit.ls()
    assert (line.action, line.detail["marked"]) == ("slots.recover", ["public.t"])

    assert run(capsys, "slots", "recover", "-c", held.path, "--new-epoch", "--yes").status == 0
    held.stream()
    assert held.folded("t") == sorted(rows_of(held.dsn, "SELECT id::text, v FROM t"))
    assert {s.state for s in held.log.schemas().values() if s.name == "t"} == {TableState.LIVE}


def test_the_reader_process_tries_again_with_pauses_and_names_slot_and_next_step(held: Captured) -> None:
    said = held.folder / "reader.out"
    with said.open("ab") as output:
        child = start("cdc", "reader", "-c", held.path, "--log-format", "json", output=output)

    def refusals() -> list[dict[str, Any]]:
        lines = [json.loads(text) for text in said.read_text().splitlines() if text.startswith("{") and text[-1] == "}"]
        return [one for one in lines if one.get("code") == UndecodableWal.code]

    try:
        until(lambda: len(refusals()) >= 3, said.read_text)
        child.terminate()
        assert child.wait(PATIENCE) in {0, 1}
    finally:
        child.kill()
    failures = refusals()
    assert all(held.slot in f["message"] and "XX000" in f["message"] for f in failures)
    assert all("--skip-to" in f["fix"] for f in failures)


def test_a_skip_that_was_killed_before_the_slot_moved_can_be_run_again(held: Captured) -> None:
    lsn = wal_end(held.dsn)
    command = ("slots", "recover", "-c", held.path, "--skip-to", lsn, "--resync", "*", "--yes")
    assert spawn(*command, environment={VARIABLE: "after_skip_marked"}).status == -signal.SIGKILL
    assert spawn(*command).status == 0
    run_sql(held.dsn, "INSERT INTO t VALUES (3, 'three')")
    held.stream()
    assert ("3", "three") in held.folded("t")


def test_nothing_is_skipped_for_a_log_that_waits_for_another_epoch(held: Captured) -> None:
    before = held.log.durable
    assert before is not None
    write_pending_epoch(held.folder / "log", PendingEpoch(before.epoch + 1, "asked for"))
    done = spawn("slots", "recover", "-c", held.path, "--skip-to", "FFFF/0", "--resync", "*", "--yes", "--json")
    assert done.envelope["error"]["code"] == StateConflict.code
    assert "--new-epoch" in done.envelope["error"]["suggestion"]
    assert held.log.durable == before


def test_a_publication_made_again_is_named_with_slot_and_positions_and_its_remedy_works(held: Captured) -> None:
    run_sql(held.dsn, "DROP PUBLICATION cdc_held_pub", "CREATE PUBLICATION cdc_held_pub FOR TABLE t")
    with ReaderProcess(held) as reader:
        assert reader.child.wait(PATIENCE) != 0, reader.output()
    with Catalog.open(held.definition.catalog.url) as catalog:
        (report,) = catalog.processes.ls("held")
    assert report.error is not None
    assert report.error["code"] == PublicationReplaced.code
    assert f"slot {held.slot!r} is at 0/" in report.error["message"]
    assert f"the log is at {held.log.durable}" in report.error["message"]
    assert "'cdc slots recover -c FILE --new-epoch'" in report.error["suggestion"]
    assert spawn("slots", "recover", "-c", held.path, "--new-epoch", "--yes").status == 0
    held.stream()
