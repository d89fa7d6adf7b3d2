"""`cdc run` with snapshot.mode initial_only, in real processes: the reader ends when it is done, the server goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from tests.cli.command import spawn
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until


def seeded(folder: Path, dsn: str) -> Captured:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 2000) i",
    )
    held = Captured(folder, dsn)
    with held.path.open("a") as definition:
        definition.write("snapshot: {mode: initial_only, beside: 0, chunk_rows: 500}\nservice: {port: 0}\n")
    return held


def reader_state(catalog: Catalog) -> str | None:
    return next((report.state for report in catalog.processes.ls("held") if report.process == "reader"), None)


@pytest.mark.slow
def test_the_reader_ends_and_is_not_started_again_while_the_server_goes_on(tmp_path: Path, database: str) -> None:
    held = seeded(tmp_path, database)
    command = [sys.executable, "-m", "cdc", "run", "-c", str(held.path), "--only", "reader", "--only", "server"]
    output = tmp_path / "run.out"
    with output.open("wb") as told, Catalog.open(held.definition.catalog.url) as catalog:
        run = subprocess.Popen(command, stdout=told, stderr=told)
        try:
            until(lambda: reader_state(catalog) == "copied", output.read_text)
            until(lambda: "reader │ is done" in output.read_text(), output.read_text)
            assert run.poll() is None
            server = next(report for report in catalog.processes.ls("held") if report.process == "server")
            until(
                lambda: any(
                    report.process == "server" and report.reported_at != server.reported_at
                    for report in catalog.processes.ls("held")
                ),
                "another word of the server",
            )
            told_people = spawn("status", "-c", held.path)
            run.send_signal(signal.SIGTERM)
            assert run.wait(30) == 0
        finally:
            run.kill()
            run.wait()
    assert "copied" in told_people.output
    assert "the process does not run (failed)" not in told_people.output
    assert "restarting" not in output.read_text()
    assert held.folded("t") == sorted(rows_of(database, "SELECT id::text, v FROM t"))


@pytest.mark.slow
def test_with_nothing_else_to_run_the_command_ends_by_itself(tmp_path: Path, database: str) -> None:
    held = seeded(tmp_path, database)
    done = spawn("run", "-c", held.path, "--only", "reader", "--json")
    assert (done.status, done.envelope["result"]["restarts"]) == (0, {"reader": 0})
    assert held.folded("t") == sorted(rows_of(database, "SELECT id::text, v FROM t"))
