"""Shards of a real source in one Delta table: exact for each of them through changes, copies, repair and replay."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from cdc.errors import ConfigError
from cdc.postgres.connection import connect
from cdc.targets.lake_reader import Lake
from pipelines.__main__ import main
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.replay import replay
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.pipelines.apply_thread import ApplyThread, run_verify
from tests.snapshot.reader_with_backfills import Running

SHARDS = ("s1", "s2", "s3")


@pytest.fixture(name="captured")
def _captured(tmp_path: Path, database: str) -> Captured:
    """Three shards with the same keys, and a table beside them; one of the shards has a column more."""
    for shard in SHARDS:
        run_sql(
            database,
            f"CREATE TABLE {shard} (id int PRIMARY KEY, v text, n int)",
            f"INSERT INTO {shard} SELECT i, '{shard}-' || i, i FROM generate_series(1, 300) i",
        )
    run_sql(
        database,
        "ALTER TABLE s3 ADD own text DEFAULT 'x'",
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1)",
    )
    captured = Captured(tmp_path, database)
    with captured.path.open("a") as definition:
        definition.write(
            f"sinks:\n- {{name: lake, type: delta, path: '{tmp_path}/lake/{{schema}}/{{table}}', rules: "
            f"[{{match: 'public.s*', path: '{tmp_path}/lake/public/shards', merge_tables: true}}]}}\n"
        )
    captured.copy()
    return captured


def shards(captured: Captured) -> DeltaTable:
    return DeltaTable(str(captured.folder / "lake/public/shards"))


def work(captured: Captured) -> None:
    """Changes of every kind in every shard, some of them in one transaction; one shard is emptied."""
    with connect(captured.dsn) as conn:
        for shard in SHARDS:
            conn.execute(f"UPDATE {shard} SET v = v || '!' WHERE id % 3 = 0")
            conn.execute(f"DELETE FROM {shard} WHERE id % 5 = 0")
            conn.execute(f"UPDATE {shard} SET id = id + 1000 WHERE id % 7 = 0")
            conn.execute(f"INSERT INTO {shard} (id, v) VALUES (5, 'again')")
        with conn.transaction():
            conn.execute("TRUNCATE s2")
            conn.execute("INSERT INTO s2 SELECT i, 'late', i FROM generate_series(1, 10) i")
            conn.execute("UPDATE s1 SET n = n + 1")


@pytest.mark.slow
def test_shards_are_equal_to_their_source_and_mended_and_built_anew_by_table(
    captured: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    with Running(captured) as running, ApplyThread(captured) as applying:
        work(captured)
        running.until(lambda: run_verify(captured, capsys)[0] == 0)
        with connect(captured.dsn) as conn:
            conn.execute("ALTER TABLE s1 ADD more int DEFAULT 7")
            conn.execute("ALTER TABLE s2 ADD own text DEFAULT 'y'")
        work(captured)
        running.until(lambda: run_verify(captured, capsys)[0] == 0)
        with applying.resting():
            shards(captured).delete("id < 20 AND v <> 'late'")
            shards(captured).update(updates={"v": "'bad'"}, predicate="id = 104")
        status, found = run_verify(captured, capsys)
        wrong = {table["topic"] for table in found["result"]["tables"] if not table["equal"]}
        assert (status, wrong) == (4, {"public.s1", "public.s3"})
        status, found = run_verify(captured, capsys, "--repair")
        assert (status, found["ok"]) == (0, True), found
        with applying.resting():
            shards(captured).delete("id > 50")
            assert replay(captured.definition, ReplayOptions(sink="lake")).ok
        work(captured)
        running.until(lambda: run_verify(captured, capsys)[0] != 1)  # the apply process has reported again
        status, found = run_verify(captured, capsys)
        assert (status, found["ok"]) == (0, True), found
        assert run_verify(captured, capsys, "--against", "log")[0] == 0
    assert (
        Lake.open(f"{captured.folder}/lake/{{schema}}/{{table}}").query("select * from shards").read_all().num_rows
        > 300
    )


@pytest.mark.slow
def test_a_replay_takes_all_tables_of_a_target_or_none_and_never_elsewhere(
    captured: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    with Running(captured) as running, ApplyThread(captured):
        running.until(lambda: run_verify(captured, capsys)[0] == 0)
    with pytest.raises(ConfigError, match=r"'public.s1' shares its target with 'public.s2'") as told:
        replay(captured.definition, ReplayOptions(sink="lake", tables=("s1",)))
    assert "--tables public.s1 --tables public.s2 --tables public.s3" in told.value.fix
    assert main(["replay", "lake", "--into", str(captured.folder / "apart"), "-c", str(captured.path)]) == 2
    assert replay(captured.definition, ReplayOptions(sink="lake", tables=("t",))).ok
    assert replay(captured.definition, ReplayOptions(sink="lake", tables=("s?",))).ok
    assert len(
        {shard["_relation"] for shard in pa.table(shards(captured).scan(columns=["_relation"])).to_pylist()}
    ) == len(SHARDS)
