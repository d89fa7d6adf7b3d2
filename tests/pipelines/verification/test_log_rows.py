"""verify --against log: the rows of the sinks are those of the folded log, without the source."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from cdc.position import Position
from cdc.targets.lake_reader import Lake
from cdc.targets.search_index_reader import SearchIndex
from pipelines.verification.log_rows import FoldedLog
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until
from tests.pipelines.apply_thread import STRAY, ApplyThread, capture_with_sinks, run_verify, spoil_index, spoil_lake

LARGE_TEXT = "repeat(md5('x'), 400)"


@pytest.fixture(name="captured")
def _captured(tmp_path: Path, database: str) -> Captured:
    """Three tables with changes of every kind behind them, applied; then their source is gone."""
    run_sql(
        database,
        "CREATE TABLE t (id int, part numeric(6,2), born timestamptz, v text, PRIMARY KEY (id, part))",
        "INSERT INTO t SELECT i, i / 4.0, '2026-01-01Z'::timestamptz + i * interval '1 s', 'v' || i"
        " FROM generate_series(1, 400) i",
        "CREATE TABLE u (place float8 PRIMARY KEY, v text, large text)",
        "ALTER TABLE u ALTER large SET STORAGE EXTERNAL",
        f"INSERT INTO u SELECT i / 10.0, 'v' || i, {LARGE_TEXT} FROM generate_series(1, 100) i",
        "CREATE TABLE bag (v text, n real)",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag SELECT 'v' || i % 3, i % 2 FROM generate_series(1, 60) i",
    )
    captured = capture_with_sinks(tmp_path, database)
    run_sql(
        database,
        "UPDATE u SET v = NULL WHERE place < 2",
        "UPDATE u SET place = place + 100 WHERE place > 9",
        "ALTER TABLE u ADD note text DEFAULT 'unsaid'",
        "INSERT INTO u VALUES (-0.5, '', NULL, NULL)",
        "DELETE FROM t WHERE id % 7 = 0",
        "UPDATE t SET part = part + 500 WHERE id > 390",
        "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE v = 'v1' LIMIT 5)",
        "UPDATE bag SET n = 'NaN' WHERE v = 'v2' AND n = 0",
    )
    end = captured.stream()
    with ApplyThread(captured):
        lake, index = Lake.open(f"{tmp_path}/lake/{{schema}}/{{table}}"), tmp_path / "find"
        until(lambda: (r := lake.published()) and r.position >= end, lambda: "the lake")
        until(lambda: (r := SearchIndex.open(index).published) and r.position >= end, lambda: "the index")
    captured.path.write_text(captured.path.read_text().replace(database, "postgresql://nobody@127.0.0.1:1/gone"))
    return captured


def test_without_its_source_every_sink_is_compared_with_the_log_and_mismatches_are_named(
    captured: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run_verify(captured, capsys, "--against", "log")
    tables = {(table["sink"], table["topic"]): table for table in found["result"]["tables"]}
    assert (status, len(tables)) == (0, 5), found
    assert {table["rows"] for (_, topic), table in tables.items() if topic == "public.t"} == {343}
    assert run_verify(captured, capsys, "--against", "log", "--mode", "count")[0] == 0
    spoil_lake(captured)
    spoil_index(captured, STRAY)
    bag = DeltaTable(str(captured.folder / "lake" / "public" / "bag"))
    write_deltalake(bag, pa.table(bag.scan()).slice(0, 1), mode="append")
    status, found = run_verify(captured, capsys, "--against", "log")
    wrong = {(t["sink"], t["topic"]): t["counts"] for t in found["result"]["tables"] if not t["equal"]}
    assert status == 4
    assert wrong == {
        ("lake", "public.t"): {"missing": 2, "extra": 2, "differing": 1},
        ("lake", "public.u"): {"missing": 0, "extra": 0, "differing": 1},
        ("lake", "public.bag"): {"missing": 0, "extra": 1, "differing": 0},
        ("find", "public.t"): {"missing": 1, "extra": 2, "differing": 0},
    }


@pytest.mark.slow
def test_a_large_table_is_folded_by_spark_to_the_same_rows(captured: Captured, spark: SparkSession) -> None:
    sink = captured.definition.sinks[0]
    state = FoldedLog(captured.log, sink.name, sink.tables, captured.log.durable or Position(0), lambda: spark, large=0)
    here = FoldedLog(captured.log, sink.name, sink.tables, state.upto, lambda: spark)
    for table in state.tables():
        sides = [
            sorted(str((row["key"], sorted(row["after"]))) for part in one.folded(table) for row in part.to_pylist())
            for one in (state, here)
        ]
        assert sides[0] == sides[1], table.topic
        assert sides[0]
