"""The log's directory is deleted under a running reader, or closed to it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cdc.errors import ExitCode, LogCorrupt, LogUnwritable
from tests.faults.capture import Captured, ReaderProcess
from tests.fixtures import forked
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until

OBEYING = """
import ctypes, runpy
library = ctypes.CDLL(None, use_errno=True)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert library.capget(header, sets) == 0
for place in range(3):  # effective, permitted, inheritable
    sets[place] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
assert library.capset(header, sets) == 0, ctypes.get_errno()
runpy.run_module("cdc", run_name="__main__", alter_sys=True)
"""
"""The command as a user who obeys the modes of files; root does not otherwise."""


def streaming(held: Captured, reader: ReaderProcess, number: int) -> None:
    """Wait until the reader has taken a row to the log."""
    run_sql(held.dsn, f"INSERT INTO t VALUES ({number}, 'x')")
    until(lambda: (str(number), "x") in held.folded("t"), reader.output)


@pytest.mark.parametrize("gone", ["log", pytest.param("log/changes", marks=pytest.mark.slow), "log/changes/_delta_log"])
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
    with output.open("wb") as stream:
        child = forked.start("tests.run_code", OBEYING, "reader", "-c", held.path, output=stream)
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
            child.wait()
