"""verify --repair: changes that another client made in a target are repaired row by row, while the pipeline runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL
from pipelines.__main__ import main
from pipelines.verification.compare_rows import LISTED
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.pipelines.apply_thread import STRAY, ApplyThread, capture_with_sinks, run_verify, spoil_index, spoil_lake
from tests.snapshot.reader_with_backfills import Running


@pytest.fixture(name="captured")
def _captured(tmp_path: Path, database: str) -> Captured:
    """Two tables, one with a key of two columns, in a lake and an index."""
    run_sql(
        database,
        "CREATE TABLE t (id int, part numeric(6,2), born timestamptz, v text, PRIMARY KEY (id, part))",
        "INSERT INTO t SELECT i, i / 4.0, '2026-01-01Z'::timestamptz + i * interval '1 s', 'v' || i"
        " FROM generate_series(1, 400) i",
        "CREATE TABLE u (place float8 PRIMARY KEY, v text)",
        "INSERT INTO u SELECT i / 10.0, 'v' || i FROM generate_series(1, 100) i",
    )
    return capture_with_sinks(tmp_path, database)


@contextmanager
def workload(dsn: str) -> Iterator[Callable[[], int]]:
    """Changes of some rows of table t, spoiled ones among them, until the block ends; gives their number."""
    done, count = Event(), [0]

    def write() -> None:
        with connect(dsn) as conn:
            while not done.wait(0.1):
                count[0] = number = count[0] + 1
                conn.execute("UPDATE t SET v = %s WHERE id = %s", [f"w{number}", 295 + number % 10])
                conn.execute("DELETE FROM t WHERE id = %s", [1000 + number - 5])
                conn.execute("INSERT INTO t VALUES (%s, %s, now(), 'new')", [1000 + number, number])
                conn.execute("UPDATE t SET part = part + 100 WHERE id = %s AND part < 200", [290 + number % 20])

    writer = Thread(target=write)
    writer.start()
    try:
        yield lambda: count[0]
    finally:
        done.set()
        writer.join()


def test_rows_that_another_client_removed_added_and_changed_are_repaired_while_the_pipeline_runs(
    captured: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    with Running(captured) as running, ApplyThread(captured) as applying, workload(captured.dsn) as written:
        running.until(lambda: written() > 10)
        with applying.resting():
            spoil_lake(captured)
            spoil_index(captured, STRAY)
        before = written()
        status, found = run_verify(captured, capsys, "--repair")
        assert (status, found["ok"]) == (0, True), found
        running.until(lambda: written() > before + 10)
        status, after = run_verify(captured, capsys)
        assert (status, after["ok"]) == (0, True), after
        requested = running.catalog.commands.ls("held", BACKFILL)
    repaired = {(one["sink"], one["topic"]): one for one in found["result"]["repaired"]["tables"]}
    assert repaired.keys() == {("lake", "public.t"), ("lake", "public.u"), ("find", "public.t")}
    # later changes of the workload may have repaired some rows
    lake, index = repaired["lake", "public.t"], repaired["find", "public.t"]
    assert (lake["extra"], lake["missing"] >= 2, lake["differing"] >= 1) == (2, True, True)
    assert (index["extra"], index["missing"], index["differing"]) == (1, 1, 1)
    assert all(one["equal"] and one["keys"] for one in repaired.values())
    numbers = sorted(number for one in repaired.values() for number in one["backfills"])
    assert {command.payload["sink"] for command in requested if command.id in numbers} == {"lake", "find"}
    assert all(table["equal"] for table in found["result"]["tables"])
    assert len(found["result"]["tables"]) == 4


@pytest.mark.slow
def test_equal_tables_request_nothing_and_what_cannot_be_repaired_is_reported_with_a_remedy(
    captured: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sql(captured.dsn, "INSERT INTO u SELECT i / 10.0, 'v' || i FROM generate_series(101, 10100) i")
    with Running(captured) as running, ApplyThread(captured) as applying:
        running.until(lambda: run_verify(captured, capsys)[0] == 0)
        status, found = run_verify(captured, capsys, "--repair")
        assert (status, found["result"]["repaired"]) == (0, {"position": None, "tables": []})
        with applying.resting():
            t, u = (str(captured.folder / "lake" / "public" / name) for name in "tu")
            row = pa.table(DeltaTable(t).scan(predicate="id = 10"))
            write_deltalake(t, row, mode="append")  # a key twice: one row replaces both
            DeltaTable(u).delete()
            spoil_index(captured, {("x", "1.00"): "bad"})
        status, found = run_verify(captured, capsys, "--repair")
        repaired = {(one["sink"], one["topic"]): one for one in found["result"]["repaired"]["tables"]}
        assert (status, found["error"]["code"]) == (4, "CDC-6001")
        twice = repaired["lake", "public.t"]
        assert (twice["equal"], twice["keys"], twice["extra"], twice["reason"]) == (True, 1, 1, None)
        assert repaired["lake", "public.u"]["reason"] == (
            "more than 10,000 keys differ → cdc replay lake --tables 'public.u'"
        )
        no_key = repaired["find", "public.t"]["reason"]
        assert no_key.startswith("invalid key 'x,1.00' of table 'public.t'")
        assert no_key.endswith("→ cdc replay find")
        assert all(len(table["missing"]) <= LISTED for table in found["result"]["tables"])
        assert running.catalog.commands.pending("held", BACKFILL) == []
        assert main(["verify", "t", "--sink", "lake", "--repair", "-c", str(captured.path)]) == 0


@pytest.mark.slow
def test_without_a_reader_no_backfill_is_requested(captured: Captured, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs, but does not say so."""
    with Running(captured) as running, ApplyThread(captured, reports=("apply",)) as applying:
        running.until(lambda: run_verify(captured, capsys)[0] == 0)
        with applying.resting():
            spoil_index(captured, STRAY)
        status, found = run_verify(captured, capsys, "--repair")
    assert (status, found["error"]["code"]) == (1, "CDC-5003")
