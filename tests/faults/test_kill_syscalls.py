"""kill -9 of the reader at each system call that changes the disk: the log is exact after the next start."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.capture import Captured
from tests.faults.forked_strace import traced
from tests.faults.write_load import TABLE
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import PATIENCE, until

ROWS = 60
CALLS = {"link": "link,linkat", "unlink": "unlink,unlinkat", "fsync": "fsync"}
DEFAULT = {("link", 1), ("unlink", 1), ("fsync", 1)}
"""Reached by every run; the others where a thread makes more such calls."""
QUICK = {("link", 1), ("unlink", 1)}
"""Before a commit as with fsync, and after one; test_failing_sync and test_power_loss are about fsync."""


def killed_at(held: Captured, calls: str, nth: int) -> bool:
    """Run a reader that dies before its nth such call of a thread takes effect; False if no thread made as many."""
    trace, end = held.folder / "trace", held.wal_end()
    options = ["-e", f"trace={calls}", "-e", f"inject={calls}:signal=KILL:when={nth}"]
    with (
        (held.folder / "reader.out").open("wb") as output,
        traced(options, trace, "cdc", "reader", "-c", held.path, output=output) as child,
    ):
        said = (held.folder / "reader.out").read_text
        until(lambda: child.poll() is not None or held.holds(end), said, every=0.02)
        child.terminate()
        killed = child.wait(PATIENCE) == -signal.SIGKILL
    made, unfinished = begun(trace.read_text())
    most = max(made.values(), default=0)
    assert killed == (most >= nth), f"{most} calls of one thread, and killed: {killed}"
    assert not killed or any(made[thread] == nth for thread in unfinished), "it was killed elsewhere"
    return killed


def begun(trace: str) -> tuple[Counter[str], set[str]]:
    """How many calls each thread began, and the threads whose last one had no effect that was seen."""
    made, last = Counter[str](), dict[str, str]()
    for line in trace.splitlines():
        thread, said = line.split(maxsplit=1)
        if said.startswith(("---", "+++")):
            continue
        made[thread] += not said.startswith("<...")
        last[thread] = said
    return made, {thread for thread, said in last.items() if said.endswith(("= ?", "<unfinished ...>"))}


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(
    ("call", "nth"),
    [
        pytest.param(call, nth, marks=[] if (call, nth) in QUICK else [pytest.mark.slow])
        for call in CALLS
        for nth in range(1, 4)
    ],
)
def test_a_reader_killed_before_a_change_of_the_disk_loses_and_doubles_nothing(
    tmp_path: Path, database: str, call: str, nth: int
) -> None:
    run_sql(database, TABLE)
    held = Captured(tmp_path, database)
    held.copy()
    run_sql(database, f"INSERT INTO t SELECT i, 'x' FROM generate_series(1, {ROWS}) i")  # type: ignore[arg-type]
    run_sql(database, "UPDATE t SET v = 'y' WHERE id % 3 = 0")
    killed = killed_at(held, CALLS[call], nth)
    if (call, nth) in DEFAULT:
        assert killed, "the test tries nothing"
    held.stream()

    log = held.log
    rows = [row for batch in log.rows(log.every_file()[0].first, log.durable) for row in batch.to_pylist()]  # type: ignore[arg-type]
    assert len({(row["position"], row["ordinal"]) for row in rows}) == len(rows)
    assert held.folded("t") == sorted(rows_of(database, "SELECT id::text, v FROM t"))
