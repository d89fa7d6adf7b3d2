"""verify over targets of every mode, as sinks write them: the rows of now are what the source and the log say."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc.targets.lake_reader import Lake
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until
from tests.pipelines.apply_thread import ApplyThread, run_verify
from tests.snapshot.reader_with_backfills import Running

RULES = (
    "{match: public.versions, stored_as_scd_type: 2}, {match: public.changes, mode: append}, "
    "{match: public.marked, mode: soft_delete}, {match: public.waits, stored_as_scd_type: 2}, "
    "{match: public.hidden, transform: {mask: {v: redact}, rename: {n: m}}}"
)
TABLES = ("versions", "changes", "marked", "hidden")
PARKED = ("parks", "waits")


@pytest.fixture(name="captured")
def _captured(tmp_path: Path, database: str) -> Captured:
    """The same rows in four tables, each kept in another way."""
    for name in TABLES:
        run_sql(
            database,
            f"CREATE TABLE {name} (id int PRIMARY KEY, n int, v text)",
            f"INSERT INTO {name} SELECT i, i % 7, 'v' || i FROM generate_series(1, 60) i",
        )
    for name in PARKED:
        run_sql(
            database,
            f"CREATE TABLE {name} (id int PRIMARY KEY, n numeric(5,2))",
            f"INSERT INTO {name} VALUES (1, 1), (2, 2)",
        )
    captured = Captured(tmp_path, database)
    with captured.path.open("a") as definition:
        lake = f"{{name: lake, type: delta, path: '{tmp_path}/lake/{{schema}}/{{table}}', rules: [{RULES}]}}"
        definition.write(f"sinks:\n- {lake}\n")
    captured.copy()
    return captured


def change(database: str) -> None:
    for name in PARKED:
        run_sql(database, f"UPDATE {name} SET n = 'NaN' WHERE id = 1", f"UPDATE {name} SET n = 3 WHERE id = 2")
    for name in TABLES:
        run_sql(
            database,
            f"UPDATE {name} SET n = n + 1 WHERE id < 50",
            f"UPDATE {name} SET n = n + 1 WHERE id < 20",
            f"DELETE FROM {name} WHERE id % 10 = 0",
            f"INSERT INTO {name} VALUES (10, NULL, ''), (900, 1, NULL)",
            f"UPDATE {name} SET id = 901 WHERE id = 900",
        )


def test_the_rows_of_now_are_compared_whatever_a_target_keeps_of_the_past(
    captured: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    with Running(captured), ApplyThread(captured) as applying:
        change(captured.dsn)
        for options in ((), ("--mode", "checksum")):
            status, found = run_verify(captured, capsys, *options)
            assert status == 0, found
            apart = {table["topic"]: table["parked_keys"] for table in found["result"]["tables"] if table["parked"]}
            assert apart == {f"public.{name}": [["1"]] for name in PARKED}
        end = captured.log.durable
        assert end is not None
        lake = Lake.open(f"{captured.folder}/lake/{{schema}}/{{table}}")
        until(lambda: (r := lake.published()) and r.position >= end, "the lake")
        assert run_verify(captured, capsys, "--against", "log")[0] == 0
        with applying.resting():
            for name in TABLES:
                DeltaTable(str(captured.folder / "lake" / "public" / name)).update(
                    updates={"v": "'bad'"}, predicate="id = 33"
                )
        status, found = run_verify(captured, capsys)
        tables = found["result"]["tables"]
        wrong = {table["topic"]: table["counts"]["differing"] for table in tables if not table["equal"]}
        assert (status, wrong) == (4, {f"public.{name}": 1 for name in TABLES})
        assert run_verify(captured, capsys, "--repair")[0] == 0
