"""The log's directory is deleted under a running reader, or closed to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from cdc.errors import ExitCode, LogCorrupt, LogUnwritable
from tests.faults.capture import Captured, ReaderProcess
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until

OBEYING = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")
"""Has root obey the modes of files, as every other user does."""


def streaming(held: Captured, reader: ReaderProcess, number: int) -> None:
    """Wait until the reader has taken a row to the log."""
    run_sql(held.dsn, f"INSERT INTO t VALUES ({number}, 'x')")
    until(lambda: (str(number), "x") in held.folded("t"), reader.output)


@pytest.mark.parametrize("gone", ["log", "log/changes", "log/changes/_delta_log"])
def test_a_reader_whose_log_is_deleted_stops_and_names_it(tmp_path: Path, database: str, gone: str) -> None:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, v text)")
    held = Captured(tmp_path, database)
    held.copy()
    with ReaderProcess(held) as reader:
        streaming(held, reader, 1)
        shutil.rmtree(tmp_path / gone)
        run_sql(database, "INSERT INTO t VALUES (2, 'x')")
        assert reader.child.wait(60) == ExitCode.HALTED

    said = reader.output()
    assert f"✗ {LogCorrupt.code} the log's directory '{tmp_path}/log' is missing" in said
    assert "Traceback" not in said
    assert "cdc slots drop -c" in said
    assert not (tmp_path / "log" / "changes" / "_delta_log").exists()


def obeying(held: Captured, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """`cdc reader` as a user who is not above the modes of files."""
    command = [*(OBEYING if os.geteuid() == 0 else ()), sys.executable, "-m", "cdc", "reader", "-c", str(held.path)]
    return subprocess.Popen(command, stdout=output, stderr=output)


@pytest.mark.parametrize("running", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_reader_whose_log_is_closed_waits_and_goes_on_when_it_is_open(
    tmp_path: Path, database: str, running: bool
) -> None:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, v text)")
    held = Captured(tmp_path, database)
    held.copy()
    output = tmp_path / "reader.out"
    closed = [path for path in (tmp_path / "log").rglob("*") if path.is_dir()]
    for path in () if running else closed:
        path.chmod(0o555)
    with output.open("wb") as stream, obeying(held, stream) as child:
        try:
            run_sql(database, "INSERT INTO t VALUES (1, 'x')")
            if running:
                until(lambda: ("1", "x") in held.folded("t"), output.read_text)
                for path in closed:
                    path.chmod(0o555)
            run_sql(database, "INSERT INTO t VALUES (2, 'x')")
            until(lambda: LogUnwritable.code in output.read_text(), output.read_text)
            assert child.poll() is None
            for path in closed:
                path.chmod(0o755)
            until(lambda: ("2", "x") in held.folded("t"), output.read_text)
            assert "Traceback" not in output.read_text()
        finally:
            child.kill()
