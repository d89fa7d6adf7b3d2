"""One fsync that fails although the next would succeed: what it was for is written anew, never taken for durable."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.slot import slot_status
from tests.faults import forked_strace
from tests.faults.capture import Captured
from tests.faults.write_load import TABLE
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import PATIENCE, until

ROWS = 60
_FAILED = re.compile(r"fsync\(\d+<(?P<path>[^>]+)>\) += -1 EIO .*INJECTED")
_DONE = re.compile(r"fsync\(\d+<(?P<path>[^>]+)>\) += 0$")
_RENAMED = re.compile(r'rename\w*\((?:\S+ )?"(?P<old>[^"]+)", (?:\S+ )?"(?P<new>[^"]+)"')


def traced(held: Captured, nth: int) -> list[str]:
    """Run a reader whose nth fsync of each thread fails until all rows are confirmed; what it did to the disk."""
    trace, end = held.folder / "trace", held.wal_end()
    options = [
        "-y", "-s", "300", "-e", "trace=fsync,rename,renameat,renameat2", "-e", f"inject=fsync:error=EIO:when={nth}",
    ]  # fmt: skip
    with (
        (held.folder / "reader.out").open("wb") as output,
        forked_strace.traced(options, trace, "cdc", "reader", "-c", held.path, output=output) as child,
    ):
        said = (held.folder / "reader.out").read_text
        until(lambda: child.poll() is not None or is_confirmed(held, end), said, every=0.02)
        assert child.poll() is None, said()
        child.terminate()
        child.wait(PATIENCE)
    return trace.read_text().splitlines()


def is_confirmed(held: Captured, end: Lsn) -> bool:
    """Whether all rows are in the log and the server may forget them; the log is read first, for it only grows."""
    if not held.holds(end):
        return False
    durable = held.log.durable or Position(0)
    with connect(held.dsn) as conn:
        slot = slot_status(conn, held.slot)
    return slot is not None and (slot.confirmed_flush or 0) > durable.lsn


def rewritten(did: list[str], since: int, path: str) -> bool:
    """Whether after that line another file, itself synced, took the path's place."""
    synced = {found["path"] for line in did[since:] if (found := _DONE.search(line))}
    renames = [found for line in did[since:] if (found := _RENAMED.search(line))]
    return any(found["new"] == path and found["old"] in synced for found in renames)


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("nth", [pytest.param(n, marks=[] if n == 3 else [pytest.mark.slow]) for n in range(1, 11)])
def test_a_sync_that_fails_once_is_not_believed_the_second_time(tmp_path: Path, database: str, nth: int) -> None:
    run_sql(database, TABLE)
    held = Captured(tmp_path, database)
    held.copy()
    run_sql(database, f"INSERT INTO t SELECT i, 'x' FROM generate_series(1, {ROWS}) i")  # type: ignore[arg-type]
    did = traced(held, nth)

    failed = [(n, found["path"]) for n, line in enumerate(did) if (found := _FAILED.search(line))]
    assert failed, did
    in_log = {file.path for file in held.log.every_file()}
    for line, path in failed:
        if path.endswith(".json"):
            assert rewritten(did, line, path), did
        elif path.endswith(".parquet"):
            assert path not in in_log
        elif path.endswith("_delta_log"):
            assert any((done := _DONE.search(later)) and done["path"] == path for later in did[line:])
    log = held.log
    rows = [row for batch in log.rows(Position(0), log.durable or Position(0)) for row in batch.to_pylist()]
    assert len({(row["position"], row["ordinal"]) for row in rows}) == len(rows)
    assert len(held.folded("t")) == ROWS
