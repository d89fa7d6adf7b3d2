"""The upsert by executors: data files stay, old rows are deleted by vectors, and MERGE takes what it must not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from pyroaring import BitMap
from pyspark.sql import SparkSession

from cdc.config import EngineChoice
from cdc.delta_protocol.table_storage import storage_of
from cdc.position import Position
from cdc.table import TableState
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.executor_key_search import NewVector, SearchedFiles
from pipelines.sinks.delta.executor_upsert import commit_written, files_to_change, is_older, write_own_rows
from pipelines.sinks.delta.indexed.delta_log import LiveFile, LiveFiles
from pipelines.sinks.delta.new_data_files import TargetFolder
from tests.pipelines.cold_log import append, log_writer
from tests.pipelines.fold_model import Row, log_row
from tests.pipelines.sinks.delta.test_executor_merge import first_copy, image, written
from tests.pipelines.sinks.delta.vector_tables import VectorTable, rows_in, upsert
from tests.pipelines.test_both_ways import loop_in, parked_in, rows_of, schema

pytestmark = pytest.mark.usefixtures("with_delta")
COPY = 100
PLACES = {"_position": [2], "_ordinal": [0]}


def changes(position: int, updated: range, deleted: range, created: range = range(0)) -> list[Row]:
    """One transaction."""
    rows = [log_row(1, (position, key), "u", key=[str(key)], after=image(key, str(position))) for key in updated]
    rows += [log_row(1, (position, key), "d", key=[str(key)]) for key in deleted]
    rows += [log_row(1, (position, key), "c", key=[str(key)], after=image(key, "1")) for key in created]
    return [written(row) for row in rows]


TRANSACTIONS = (
    first_copy(),
    changes(200, range(8, 12), range(20, 25), range(40, 50)),
    changes(300, range(8, 10), range(10, 14), range(20, 22)),
    changes(400, range(1), range(40, 50)),
)
"""The first copy, changes of its file, changes of the same and of its vectors, and the end of the second file."""


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Path:
    writer = log_writer(tmp_path / "log")
    for transaction in TRANSACTIONS:
        append(writer, [transaction])
    return tmp_path / "log"


def target_of(loop: SinkLoop) -> DeltaTable:
    (table,) = loop.record.tables.values()
    return DeltaTable(table.target)


def files_of(loop: SinkLoop) -> frozenset[str]:
    return frozenset(target_of(loop).file_uris())


def makers_of_commits(loop: SinkLoop) -> list[Any]:
    """Who made the commits of the target, the latest first."""
    return [commit.get("engineInfo") for commit in target_of(loop).history()]


def expected_after(folder: Path, log: Path, *ends: int) -> tuple[Any, ...]:
    """What the apply process leaves that applies the same ranges."""
    with loop_in(folder / "here", log, None) as here:
        for end in ends:
            here(None, Position(end))
        return rows_of(here), parked_in(here)


def test_files_stay_until_their_last_row_is_deleted(spark: SparkSession, log: Path, tmp_path: Path) -> None:
    with loop_in(tmp_path / "lake", log, spark) as loop:
        loop(spark, Position(COPY))
        copied = files_of(loop)
        loop(spark, Position(200))
        created = files_of(loop) - copied
        assert (len(copied), len(created)) == (1, 1)
        assert copied < files_of(loop)

        loop(spark, Position(300))
        assert copied | created < files_of(loop)

        loop(spark, Position(400))
        assert copied < files_of(loop)
        assert (rows_of(loop), parked_in(loop)) == expected_after(tmp_path, log, COPY, 200, 300, 400)
        assert makers_of_commits(loop)[:3] == ["cdc"] * 3
        (table,) = loop.record.tables.values()
        frame = spark.read.format("delta").load(table.target or "")
        assert frame.count() == len(rows_of(loop)["shop.table1"])


RULES = {
    "partitions of computed texts": "[{match: shop.*, partition_by: [d], transform: {computed: {d: plain % 3}}}]",
    "filtered, shared": "[{match: shop.*, path: FOLDER/all, merge_tables: true, transform: {where: plain > 9}}]",
}


@pytest.mark.parametrize("rules", RULES)
def test_executors_write_partitions_and_what_spark_computes(
    spark: SparkSession, log: Path, tmp_path: Path, rules: str
) -> None:
    ends = [Position(rows[0]["position"]) for rows in TRANSACTIONS]
    with loop_in(tmp_path / "here", log, spark, rules=RULES[rules], engine=EngineChoice.HERE) as here:
        for end in ends:
            here(None, end)
        expected = rows_of(here), parked_in(here), partitions_of(here)
    with loop_in(tmp_path / "lake", log, spark, rules=RULES[rules]) as loop:
        for end in ends:
            loop(spark, end)
        assert (rows_of(loop), parked_in(loop), partitions_of(loop)) == expected
        assert makers_of_commits(loop)[:3] == ["cdc"] * 3


def partitions_of(loop: SinkLoop) -> set[str]:
    """The partition values of the live files of the target, as JSON."""
    (table,) = loop.record.tables.values()
    files = LiveFiles.read(storage_of(table.target or "")).by_path.values()
    assert all(re.match(r"part-[0-9a-zA-Z.-]*\.parquet$", file.path) for file in files)
    return {json.dumps(file.add["partitionValues"]) for file in files}


@pytest.mark.parametrize(
    ("statistics", "expected"),
    [
        ({"maxValues": {"_position": 100}, "nullCount": {"_position": 0}}, True),
        ({"maxValues": {"_position": 101}, "nullCount": {"_position": 0}}, False),
        ({"maxValues": {"_position": 100}, "nullCount": {"_position": 1}}, False),
        ({"numRecords": 3}, False),
    ],
)
def test_a_file_is_older_than_a_batch_if_its_statistics_say_so(statistics: dict[str, Any], expected: bool) -> None:
    assert is_older(LiveFile({"path": "any.parquet", "stats": json.dumps(statistics)}), after=100) is expected


def test_files_and_vectors_are_not_committed_after_a_commit_of_another_client(tmp_path: Path) -> None:
    table = VectorTable(f"{tmp_path}/table")
    table.merge(upsert(1, id=1, item="a"))
    target = DeltaTarget(table.uri, DeltaTable(table.uri))
    live = files_to_change(target, after=1)
    assert live is not None
    (file,) = live.by_path.values()
    written_vectors = SearchedFiles.of(table.uri, [file]).write_vectors_of({0: BitMap([0])})
    vectors = [NewVector.of(row) for batch in written_vectors for row in batch.to_pylist()]
    new = write_own_rows(TargetFolder(table.uri, ()), pa.table({"id": [1], "item": ["b"], **PLACES}))
    write_deltalake(table.uri, pa.table({"id": [2], "item": ["c"], **PLACES}), mode="append")

    with pytest.raises(CommitFailedError, match="another client committed"):
        commit_written(target, live, vectors, new, TxnMarker("app", 2))
    assert [(row["id"], row["item"]) for row in rows_in(table.uri)] == [(1, "a"), (2, "c")]
    assert files_to_change(DeltaTarget(table.uri, DeltaTable(table.uri)), after=1) is None


def test_rows_of_another_client_are_replaced(spark: SparkSession, log: Path, tmp_path: Path) -> None:
    with loop_in(tmp_path / "lake", log, spark) as loop:
        loop(spark, Position(COPY))
        target = target_of(loop)
        columns = pa.schema(target.schema().to_arrow())
        foreign = {"id": 45, **{name: None for name in columns.names if name != "id"}}
        write_deltalake(target, pa.Table.from_pylist([foreign], columns), mode="append")
        loop(spark, Position(200))
        (row,) = [row for row in rows_of(loop)["shop.table1"] if row["id"] == 45]
        assert row["plain"] == 1
        assert makers_of_commits(loop)[0] != "cdc"


def test_a_row_stays_whose_new_image_waits_for_the_running_copy(spark: SparkSession, tmp_path: Path) -> None:
    copying = replace(schema(1), state=TableState.SNAPSHOTTING)
    moved = log_row(1, (200, 1), "u", key=["9"], old_key=["90"], after={1: "9", 2: "5"}, partial=True)
    writer = log_writer(tmp_path / "log")
    append(writer, [first_copy()])
    append(writer, [[written(log_row(1, (200, 0), "s", payload=copying.to_json())), written(moved)]])
    with loop_in(tmp_path / "lake", tmp_path / "log", spark) as loop:
        loop(spark, Position(COPY))
        loop(spark, Position(200))
        assert (rows_of(loop), parked_in(loop)) == expected_after(tmp_path, tmp_path / "log", COPY, 200)
