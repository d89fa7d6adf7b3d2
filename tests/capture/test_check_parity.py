"""Check parity: where a reader stops at its start, doctor names the same code before; the situations of the catalogue.

`faults/test_source_history.py` asks the same of those that need a server of their own.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from cdc import metrics
from cdc.capture.reader import Reader
from cdc.capture.settings import reader_settings
from cdc.capture.startup_checks import check_log
from cdc.errors import CdcError
from cdc.log.epoch_records import PendingEpoch, write_pending_epoch
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.snapshot.watermark_window import WatermarkWindows
from tests.cli.command import run
from tests.faults.capture import Captured
from tests.fixtures.disk import small_file_system
from tests.fixtures.postgres import drop_when_free, run_sql

Break = Callable[[Captured], object]


def replaced(held: Captured, made: str | None) -> None:
    with connect(held.dsn) as conn:
        drop_when_free(conn, held.slot)
        if made is not None:
            conn.execute(made, [held.slot])  # type: ignore[call-overload]


def rewritten(held: Captured, old: str, new: str) -> None:
    text = held.path.read_text()
    assert old in text
    held.path.write_text(text.replace(old, new))


def another_publication(held: Captured) -> None:
    run_sql(held.dsn, "DROP PUBLICATION cdc_held_pub", "CREATE PUBLICATION cdc_held_pub FOR ALL TABLES")


def advanced(held: Captured) -> None:
    run_sql(held.dsn, "INSERT INTO t VALUES (9)")
    with connect(held.dsn) as conn:
        conn.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [held.slot])


def epoch_over_a_foreign_slot(held: Captured) -> None:
    replaced(held, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')")
    write_pending_epoch(held.folder / "log", PendingEpoch(1, "somebody asked for it"))


def slot_of_another_database(held: Captured) -> None:
    replaced(held, None)
    with connect(held.dsn.rpartition("/")[0] + "/postgres") as conn:
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [held.slot])


def torn_record(held: Captured) -> None:
    (held.folder / "log" / "_slot.json").write_text("{")


CONTINUED: dict[str, tuple[str, Break]] = {
    "slot missing": ("CDC-2102", lambda held: replaced(held, None)),
    "slot advanced": ("CDC-2104", advanced),
    "slot made again": (
        "CDC-2104",
        lambda held: replaced(held, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')"),
    ),
    "physical slot": ("CDC-2107", lambda held: replaced(held, "SELECT pg_create_physical_replication_slot(%s)")),
    "slot of another database": ("CDC-2107", slot_of_another_database),
    "publication missing": ("CDC-2108", lambda held: run_sql(held.dsn, "DROP PUBLICATION cdc_held_pub")),
    "publication narrowed": ("CDC-2109", lambda held: run_sql(held.dsn, "ALTER PUBLICATION cdc_held_pub DROP TABLE t")),
    "publication made again": ("CDC-2110", another_publication),
    "epoch over a foreign slot": ("CDC-2115", epoch_over_a_foreign_slot),
    "torn slot record": ("CDC-4002", torn_record),
    "log gone": ("CDC-2114", lambda held: (held.folder / "log").rename(held.folder / "away")),
}
EMPTY: dict[str, tuple[str, Break]] = {
    "no table": ("CDC-2002", lambda held: run_sql(held.dsn, "DROP TABLE t")),
    "table without identity": ("CDC-2002", lambda held: run_sql(held.dsn, "CREATE TABLE bare (v int)")),
    "live slot": (
        "CDC-2114",
        lambda held: replaced(held, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')"),
    ),
    "physical slot": ("CDC-2107", lambda held: replaced(held, "SELECT pg_create_physical_replication_slot(%s)")),
    "slot that may not be created": (
        "CDC-2116",
        lambda held: rewritten(held, f"{held.slot}}}", f"{held.slot}, create: false}}"),
    ),
    "log below a file": ("CDC-4005", lambda held: rewritten(held, "/log'", "/pipeline.yaml/log'")),
    "nobody answers": ("CDC-2001", lambda held: rewritten(held, held.dsn, "postgresql://u@127.0.0.1:1/d")),
    "no such database": ("CDC-2003", lambda held: rewritten(held, held.dsn, held.dsn + "_gone")),
}


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    return Captured(tmp_path, database)


def code_of_start(held: Captured) -> str | None:
    """The code with which the reader stops at its start; None if it streams."""
    stop = Event()
    stop.set()
    try:
        check_log(held.definition)
        Reader(reader_settings(held.definition), metrics.Metrics(), stop, WatermarkWindows()).run()
    except CdcError as exc:
        return exc.code
    return None


def codes_of_doctor(held: Captured, capsys: pytest.CaptureFixture[str]) -> set[str]:
    outcome = run(capsys, "doctor", "-c", held.path, "--json")
    problems = outcome.envelope["result"]["problems"]
    assert outcome.envelope["ok"] is not any(problem["fatal"] for problem in problems)
    return {problem["code"] for problem in problems if problem["fatal"]}


@pytest.mark.parametrize("situation", CONTINUED)
def test_what_stops_a_reader_that_continues_a_log_is_said_by_doctor(
    held: Captured, situation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held.copy()
    assert (codes_of_doctor(held, capsys), code_of_start(held)) == (set(), None)
    code, break_it = CONTINUED[situation]
    slot = held.slot
    break_it(held)
    try:
        assert code in codes_of_doctor(held, capsys)
        assert code_of_start(held) == code
    finally:
        with connect(held.dsn) as conn:
            drop_when_free(conn, slot)


@pytest.mark.parametrize("situation", EMPTY)
def test_what_stops_a_first_start_is_said_by_doctor(
    held: Captured, situation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert codes_of_doctor(held, capsys) == set()
    code, break_it = EMPTY[situation]
    slot = held.slot
    break_it(held)
    assert code in codes_of_doctor(held, capsys)
    assert code_of_start(held) == code
    with connect(held.dsn) as conn:
        drop_when_free(conn, slot)


def test_another_cluster_is_said_by_doctor(
    held: Captured, postgres_16: EmbeddedPostgres, capsys: pytest.CaptureFixture[str]
) -> None:
    held.copy()
    rewritten(held, held.dsn, postgres_16.dsn())
    assert "CDC-2106" in codes_of_doctor(held, capsys)
    assert code_of_start(held) == "CDC-2106"


def test_a_server_without_logical_wal_is_said_by_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedPostgres(tmp_path / "pg", settings={"wal_level": "replica"}, tcp=True) as server:
        run_sql(server.dsn(), "CREATE TABLE t (id int PRIMARY KEY)")
        held = Captured(tmp_path, server.dsn())
        assert "CDC-2002" in codes_of_doctor(held, capsys)
        assert code_of_start(held) == "CDC-2002"


@pytest.mark.parametrize("copied", [True, False])
def test_a_log_on_a_read_only_file_system_is_said_by_doctor(
    held: Captured, copied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_file_system(held.folder / "log") as log:
        with held.path.open("a") as definition:
            definition.write(f"catalog: {{url: 'sqlite:///{held.folder}/catalog.db'}}\n")
        if copied:
            held.copy()
        subprocess.run(["mount", "-o", "remount,ro", str(log)], check=True)
        assert "CDC-4005" in codes_of_doctor(held, capsys)
        assert code_of_start(held) == "CDC-4005"


@pytest.mark.parametrize("made", [True, False])
def test_a_catalog_that_cannot_be_written_is_said_by_doctor_and_stops_no_reader(
    held: Captured, made: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_file_system(held.folder / "catalog") as place:
        with held.path.open("a") as definition:
            definition.write(f"catalog: {{url: 'sqlite:///{place}/catalog.db'}}\n")
        held.copy()
        if made:
            assert run(capsys, "migrate", "up", "-c", held.path).status == 0
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert codes_of_doctor(held, capsys) == {"CDC-5001"}
        assert code_of_start(held) is None


def test_a_lake_that_cannot_be_written_is_said_by_doctor(held: Captured, capsys: pytest.CaptureFixture[str]) -> None:
    with small_file_system(held.folder / "lake") as place:
        with held.path.open("a") as definition:
            definition.write(f"sinks: [{{type: delta, name: lake, path: '{place}/{{schema}}/{{table}}'}}]\n")
        assert codes_of_doctor(held, capsys) == set()
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert codes_of_doctor(held, capsys) == {"CDC-3003"}


def test_a_rule_that_matches_nothing_is_said_by_doctor(held: Captured, capsys: pytest.CaptureFixture[str]) -> None:
    rewritten(held, "'public.*'}", "'public.*'}, {match: 'public.ordres'}")
    with held.path.open("a") as definition:
        rules = f"path: '{held.folder}/lake/{{schema}}/{{table}}', rules: [{{match: public.tt}}]"
        definition.write(f"sinks: [{{type: delta, name: lake, {rules}}}]\n")
    problems = run(capsys, "doctor", "-c", held.path, "--json").envelope["result"]["problems"]
    assert {(problem["subject"], problem["fatal"]) for problem in problems} == {
        ("tables.1", False),
        ("sink lake rules.0", False),
    }
    assert code_of_start(held) is None
