"""Startup checks: a first start reports every problem, and doctor reports each error that would stop a reader.

`faults/test_source_history.py` compares doctor and reader for situations that need a server of their own.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdc.capture.reader import Reader, ReaderContext
from cdc.capture.settings import reader_settings
from cdc.capture.startup_checks import check_log, mask_problems
from cdc.config import load_definition
from cdc.errors import CdcError, ExitCode, PreflightFailed, SourceUnreachable
from cdc.log.epoch_and_slot_records import PendingEpoch, write_pending_epoch
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.cli.command import run, spawn
from tests.config.definitions import SOUND, write
from tests.contracts.folded import ORDERS
from tests.faults.capture import Captured
from tests.fixtures.disk import small_file_system
from tests.fixtures.postgres import drop_when_free, reader_of, rows_of, run_sql
from tests.fixtures.postgres_programs import MAIN_VERSION

TWO = r"not ready for change capture, 2 problems:\n  public\.bare: .*\n  public\.none: "


@pytest.fixture(name="unfit")
def _unfit(tmp_path: Path, database: str) -> Captured:
    """Two tables of which updates would fail once they are published."""
    run_sql(
        database,
        "CREATE TABLE bare (v text)",
        "CREATE TABLE none (id int PRIMARY KEY)",
        "ALTER TABLE none REPLICA IDENTITY NOTHING",
    )
    return Captured(tmp_path, database)


def test_a_first_start_that_is_refused_reports_every_problem_and_leaves_neither_log_nor_slot_nor_publication(
    unfit: Captured,
) -> None:
    with pytest.raises(PreflightFailed, match=TWO):
        check_log(unfit.definition)
    ended = spawn("reader", "-c", unfit.path)
    assert ended.status == ExitCode.ENVIRONMENT
    assert "public.bare" in ended.errors
    assert "public.none" in ended.errors
    assert not (unfit.folder / "log").exists()
    left = "SELECT count(*) FROM (SELECT FROM pg_publication UNION ALL SELECT FROM pg_replication_slots"
    assert rows_of(unfit.dsn, f"{left} WHERE database = current_database()) AS rest") == [(0,)]

    run_sql(unfit.dsn, "ALTER TABLE bare REPLICA IDENTITY FULL", "ALTER TABLE none REPLICA IDENTITY DEFAULT")
    check_log(unfit.definition)
    assert unfit.copy() > 0


def test_an_unreachable_source_is_a_temporary_error(tmp_path: Path) -> None:
    away = Captured(tmp_path, "postgresql://nobody@127.0.0.1:1/nothing", slot="s_away")
    with pytest.raises(SourceUnreachable):
        check_log(away.definition)


MAIL = {"transform": {"mask": {"item": "redact"}}}


@pytest.mark.parametrize(
    ("lake", "find", "shown"),
    [
        (MAIL, {"fields": ["item"]}, ["sink 'find' shows 'item' unmasked, but sink 'lake' masks these columns"]),
        ({}, MAIL, ["sink 'lake' shows 'item' unmasked, but sink 'find' masks these columns"]),
        *((MAIL, hiding, []) for hiding in (MAIL, {"fields": ["price"]}, {"except_column_list": ["item"]})),
        (MAIL, {"transform": {"drop": ["item"]}}, []),
    ],
)
def test_a_sink_that_shows_what_another_one_masks_is_a_warning(
    tmp_path: Path, lake: dict[str, Any], find: dict[str, Any], shown: list[str]
) -> None:
    text = SOUND + f"    rules: [{json.dumps({'match': 'shop.*', **lake})}]\n"
    rules = json.dumps({"match": "shop.*", **find})
    definition = load_definition(
        write(tmp_path, f"{text}  - {{name: find, type: search, path: find, rules: [{rules}]}}\n")
    )
    found = mask_problems(definition, [ORDERS])
    assert [problem.message.partition(";")[0] for problem in found] == shown


Break = Callable[[Captured], object]


def replace_slot(pipeline: Captured, statement: str | None) -> None:
    with connect(pipeline.dsn) as conn:
        drop_when_free(conn, pipeline.slot)
        if statement is not None:
            conn.execute(statement, [pipeline.slot])  # type: ignore[call-overload]


def rewrite_definition(pipeline: Captured, old: str, new: str) -> None:
    text = pipeline.path.read_text()
    assert old in text
    pipeline.path.write_text(text.replace(old, new))


def recreate_publication(pipeline: Captured) -> None:
    run_sql(pipeline.dsn, "DROP PUBLICATION cdc_held_pub", "CREATE PUBLICATION cdc_held_pub FOR ALL TABLES")


def advance_slot(pipeline: Captured) -> None:
    run_sql(pipeline.dsn, "INSERT INTO t VALUES (9)")
    with connect(pipeline.dsn) as conn:
        conn.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [pipeline.slot])


def request_epoch_over_another_slot(pipeline: Captured) -> None:
    replace_slot(pipeline, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')")
    write_pending_epoch(pipeline.folder / "log", PendingEpoch(1, "requested"))


def make_slot_in_another_database(pipeline: Captured) -> None:
    replace_slot(pipeline, None)
    with connect(pipeline.dsn.rpartition("/")[0] + "/postgres") as conn:
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [pipeline.slot])


def damage_slot_record(pipeline: Captured) -> None:
    (pipeline.folder / "log" / "_slot.json").write_text("{")


CONTINUED: dict[str, tuple[str, Break]] = {
    "slot missing": ("CDC-2102", lambda p: replace_slot(p, None)),
    "slot advanced": ("CDC-2104", advance_slot),
    "slot made again": (
        "CDC-2104",
        lambda p: replace_slot(p, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')"),
    ),
    "physical slot": (
        "CDC-2107",
        lambda p: replace_slot(p, "SELECT pg_create_physical_replication_slot(%s)"),
    ),
    "slot of another database": ("CDC-2107", make_slot_in_another_database),
    "publication missing": ("CDC-2108", lambda p: run_sql(p.dsn, "DROP PUBLICATION cdc_held_pub")),
    "publication narrowed": (
        "CDC-2109",
        lambda p: run_sql(p.dsn, "ALTER PUBLICATION cdc_held_pub DROP TABLE t"),
    ),
    "publication made again": ("CDC-2110", recreate_publication),
    "epoch over a foreign slot": ("CDC-2115", request_epoch_over_another_slot),
    "torn slot record": ("CDC-4002", damage_slot_record),
    "log gone": ("CDC-2114", lambda p: (p.folder / "log").rename(p.folder / "away")),
}
EMPTY: dict[str, tuple[str, Break]] = {
    "no table": ("CDC-2002", lambda p: run_sql(p.dsn, "DROP TABLE t")),
    "table without identity": ("CDC-2002", lambda p: run_sql(p.dsn, "CREATE TABLE bare (v int)")),
    "live slot": (
        "CDC-2114",
        lambda p: replace_slot(p, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')"),
    ),
    "physical slot": (
        "CDC-2107",
        lambda p: replace_slot(p, "SELECT pg_create_physical_replication_slot(%s)"),
    ),
    "slot that may not be created": (
        "CDC-2116",
        lambda p: rewrite_definition(p, f"{p.slot}}}", f"{p.slot}, create: false}}"),
    ),
    "log below a file": ("CDC-4005", lambda p: rewrite_definition(p, "/log'", "/pipeline.yaml/log'")),
    "no server": (
        "CDC-2001",
        lambda p: rewrite_definition(p, p.dsn, "postgresql://u@127.0.0.1:1/d"),
    ),
    "no such database": (
        "CDC-2003",
        lambda p: rewrite_definition(p, p.dsn, p.dsn + "_gone"),
    ),
}


@pytest.fixture(name="pipeline")
def _pipeline(tmp_path: Path, database: str) -> Captured:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    return Captured(tmp_path, database)


def code_of_start(pipeline: Captured) -> str | None:
    """The code with which the reader stops at its start; None if it streams."""
    context = ReaderContext()
    context.stop.set()
    try:
        check_log(pipeline.definition)
        Reader(reader_settings(pipeline.definition), context).run()
    except CdcError as exc:
        return exc.code
    return None


def codes_of_doctor(pipeline: Captured, capsys: pytest.CaptureFixture[str]) -> set[str]:
    outcome = run(capsys, "doctor", "-c", pipeline.path, "--json")
    problems = outcome.envelope["result"]["problems"]
    assert outcome.envelope["ok"] is not any(problem["fatal"] for problem in problems)
    return {problem["code"] for problem in problems if problem["fatal"]}


QUICK = {"slot missing", "slot advanced", "publication narrowed", "epoch over a foreign slot", "torn slot record"}
"""Checks of an existing log; `faults/test_source_history.py` and `faults/test_slot_ownership.py` have the others."""


@pytest.mark.parametrize(
    "situation", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONTINUED]
)
def test_doctor_reports_the_error_that_stops_a_reader_of_an_existing_log(
    pipeline: Captured, situation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.copy()
    if situation == "slot missing":  # of the others, too, there is nothing to say before
        assert (codes_of_doctor(pipeline, capsys), code_of_start(pipeline)) == (set(), None)
    code, break_it = CONTINUED[situation]
    slot = pipeline.slot
    break_it(pipeline)
    try:
        assert code in codes_of_doctor(pipeline, capsys)
        assert code_of_start(pipeline) == code
    finally:
        with connect(pipeline.dsn) as conn:
            drop_when_free(conn, slot)


def test_doctor_reports_the_error_that_stops_a_first_start(
    pipeline: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    slot, good = pipeline.slot, pipeline.path.read_text()
    for situation, (code, break_it) in EMPTY.items():
        assert codes_of_doctor(pipeline, capsys) == set(), situation
        break_it(pipeline)
        assert code in codes_of_doctor(pipeline, capsys), situation
        assert code_of_start(pipeline) == code, situation
        pipeline.path.write_text(good)
        with connect(pipeline.dsn) as conn:
            drop_when_free(conn, slot)
        run_sql(pipeline.dsn, "DROP TABLE IF EXISTS t, bare", "CREATE TABLE t (id int PRIMARY KEY)")


def test_doctor_reports_another_cluster(
    pipeline: Captured, another_cluster: EmbeddedPostgres, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.copy()
    rewrite_definition(pipeline, pipeline.dsn, another_cluster.dsn())
    assert "CDC-2106" in codes_of_doctor(pipeline, capsys)
    assert code_of_start(pipeline) == "CDC-2106"


def test_doctor_reports_a_server_without_logical_wal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"wal_level": "minimal", "max_wal_senders": "0"}
    with EmbeddedPostgres(tmp_path / "pg", version=MAIN_VERSION, settings=settings, tcp=True) as server:
        run_sql(server.dsn(), "CREATE TABLE t (id int PRIMARY KEY)")
        pipeline = Captured(tmp_path, server.dsn())
        assert "CDC-2002" in codes_of_doctor(pipeline, capsys)
        assert code_of_start(pipeline) == "CDC-2002"


def test_doctor_reports_a_log_on_a_read_only_file_system(
    pipeline: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_file_system(pipeline.folder / "log") as log:
        with pipeline.path.open("a") as definition:
            definition.write(f"catalog: {{url: 'sqlite:///{pipeline.folder}/catalog.db'}}\n")
        for copied in (False, True):
            if copied:
                pipeline.copy()
            subprocess.run(["mount", "-o", "remount,ro", str(log)], check=True)
            assert "CDC-4005" in codes_of_doctor(pipeline, capsys), copied
            assert code_of_start(pipeline) == "CDC-4005", copied
            subprocess.run(["mount", "-o", "remount,rw", str(log)], check=True)


def test_doctor_reports_a_catalog_that_cannot_be_written_and_the_reader_starts(
    pipeline: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_file_system(pipeline.folder / "catalog") as place:
        with pipeline.path.open("a") as definition:
            definition.write(f"catalog: {{url: 'sqlite:///{place}/catalog.db'}}\n")
        pipeline.copy()
        for made in (False, True):
            if made:
                assert run(capsys, "migrate", "up", "-c", pipeline.path).status == 0
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
            assert codes_of_doctor(pipeline, capsys) == {"CDC-5001"}, made
            assert code_of_start(pipeline) is None, made
            subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)


def test_doctor_reports_a_lake_that_cannot_be_written(pipeline: Captured, capsys: pytest.CaptureFixture[str]) -> None:
    with small_file_system(pipeline.folder / "lake") as place:
        with pipeline.path.open("a") as definition:
            definition.write(f"sinks: [{{type: delta, name: lake, path: '{place}/{{schema}}/{{table}}'}}]\n")
        assert codes_of_doctor(pipeline, capsys) == set()
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert codes_of_doctor(pipeline, capsys) == {"CDC-3003"}


def test_doctor_reports_a_rule_that_matches_nothing(pipeline: Captured, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite_definition(pipeline, "'public.*'}", "'public.*'}, {match: 'public.ordres'}")
    with pipeline.path.open("a") as definition:
        rules = f"path: '{pipeline.folder}/lake/{{schema}}/{{table}}', rules: [{{match: public.tt}}]"
        definition.write(f"sinks: [{{type: delta, name: lake, {rules}}}]\n")
    problems = run(capsys, "doctor", "-c", pipeline.path, "--json").envelope["result"]["problems"]
    assert {(problem["subject"], problem["fatal"]) for problem in problems} == {
        ("tables", False),
        ("lake", False),
    }
    assert code_of_start(pipeline) is None


def test_a_table_that_the_role_may_not_read_is_left_out_and_the_others_are_copied(
    tmp_path: Path, database: str
) -> None:
    run_sql(
        database,
        "CREATE TABLE ours (id int PRIMARY KEY)",
        "CREATE TABLE secret (id int PRIMARY KEY)",
        "CREATE PUBLICATION cdc_held_pub FOR ALL TABLES",
    )
    with reader_of(database, "GRANT SELECT ON ours TO {role}") as dsn:
        captured = Captured(tmp_path, dsn, slot=f"s_{database.rpartition('/')[2]}")
        text = captured.path.read_text().replace("slot: {name: ", "publication: {create: false}\n  slot: {name: ")
        captured.path.write_text(text)
        check_log(captured.definition)
        captured.copy()
        assert {schema.topic for schema in captured.log.schemas().values()} == {"public.ours"}
