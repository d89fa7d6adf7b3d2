"""Nothing happens at the source: the log grows by heartbeats alone, and the reader costs next to nothing."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event

import pytest

from tests.faults.capture import Captured, ReaderProcess
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until

IDLE = 300.0
"""Seconds: short enough to be waited for, long enough for thirty heartbeats and ten looks for what may be trimmed."""
SHARE = 0.01
"""Of one core, in seconds of it, which others that run beside hardly lengthen."""
HEARTBEAT = 10.0


@pytest.mark.slow
@pytest.mark.timeout(2 * IDLE)
def test_an_idle_reader_commits_only_its_heartbeats_and_takes_a_hundredth_of_a_core(
    tmp_path: Path, database: str
) -> None:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, v text)")
    held = Captured(tmp_path, database)
    held.copy()
    run_sql(database, "INSERT INTO t SELECT i, 'x' FROM generate_series(1, 100) i")
    with ReaderProcess(held) as reader:
        until(lambda: len(held.folded("t")) == 100, reader.output)
        begun = held.log.version
        until(lambda: held.log.version > begun, reader.output)
        versions, spent = held.log.version, cpu_seconds(reader.child.pid)
        Event().wait(IDLE)
        used = cpu_seconds(reader.child.pid) - spent
        assert held.log.version - versions <= IDLE / HEARTBEAT + 1, reader.output()
        assert held.log.version - versions >= 1
        print(f"{used:.2f} s of {IDLE:.0f} s, {held.log.version - versions} commits")
        assert used <= SHARE * IDLE, f"{used:.2f} s of {IDLE:.0f} s"


def cpu_seconds(pid: int) -> float:
    """Of a process, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
