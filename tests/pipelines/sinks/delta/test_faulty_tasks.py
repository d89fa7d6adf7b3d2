"""Tasks of a merge by executors that run twice, or while another client or driver commits: each row is there once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from cdc.config import DeltaSinkDefinition
from cdc.errors import SinkFenced
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.published_record import TableRecord
from pipelines.folding.folded_parts import FoldedParts, Piece
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.kind import delta_settings
from pipelines.sinks.delta.maintenance import UNKNOWN_FILE_AGE, TargetMaintenance, UpkeepSettings
from pipelines.sinks.delta.published_cuts_table import PublishedTable
from pipelines.sinks.delta.sink import DeltaSink
from tests.pipelines.cold_log import append, log_writer
from tests.pipelines.fold_model import Row, log_row
from tests.pipelines.sinks.delta.test_executor_merge import first_copy, image, written
from tests.pipelines.sinks.maintained_sink import Clock
from tests.pipelines.test_both_ways import loop_in, parked_in, records_of, rows_of

pytestmark = pytest.mark.usefixtures("with_delta")

Task = Callable[[Iterator[Piece]], Iterator[pa.RecordBatch]]
"""What a task does with the pieces of a part."""
Attempt = Callable[[Task, Iterator[Piece]], Iterator[pa.RecordBatch]]
"""How a task is run."""
COPY, CHANGES = 100, 200
"""Ends of the two ranges of the log."""
UNUSED_FOR = 10.0


def run_once(task: Task, pieces: Iterator[Piece]) -> Iterator[pa.RecordBatch]:
    return task(pieces)


def run_twice(task: Task, pieces: Iterator[Piece]) -> Iterator[pa.RecordBatch]:
    """Run two attempts to their ends, as speculation does, or a retry after a lost result; Spark takes one result."""
    received = list(pieces)
    for _batch in task(iter(received)):
        pass
    return task(iter(received))


@dataclass(frozen=True, slots=True)
class FaultyParts(FoldedParts):
    """Folded rows whose tasks run as `attempt` says."""

    attempt: Attempt = run_once
    planned: Callable[[], None] = lambda: None
    """Called in the driver before executors get tasks."""

    def map_parts(self, convert: Task, columns: Any) -> DataFrame:
        attempt = self.attempt
        self.planned()
        return FoldedParts.map_parts(self, lambda pieces: attempt(convert, pieces), columns)


class FaultyLake(DeltaSink):
    """A Delta sink that applies faulty parts."""

    attempt: Attempt = staticmethod(run_once)
    planned: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    def build(cls, definition: DeltaSinkDefinition) -> FaultyLake:
        return cls(delta_settings(definition))

    def apply(self, batch: TableBatch) -> TableRecord:
        parts = batch.parts
        if parts is not None:
            sizes = parts.pieces, parts.table, parts.parts, parts.excluded
            batch = replace(batch, parts=FaultyParts(*sizes, attempt=self.attempt, planned=self.planned))
        return super().apply(batch)


class TwiceRunLake(FaultyLake):
    attempt = staticmethod(run_twice)


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Path:
    """A log with a first copy and a range of changes."""
    writer = log_writer(tmp_path / "log")
    append(writer, [first_copy()])
    append(writer, [changes()])
    return tmp_path / "log"


def changes() -> list[Row]:
    """Updates, deletes and new rows with complete images."""
    rows = [log_row(1, (CHANGES, key), "u", key=[str(key)], after=image(key, "77")) for key in range(8, 20)]
    rows += [log_row(1, (CHANGES, key), "d", key=[str(key)]) for key in range(20, 25)]
    rows += [log_row(1, (CHANGES, key), "c", key=[str(key)], after=image(key, "1")) for key in range(40, 50)]
    return [written(row) for row in rows]


def apply_here(folder: Path, log: Path, end: int) -> None:
    """Let the apply process of the lake apply the log up to a position."""
    with loop_in(folder / "lake", log, None) as loop:
        loop(None, Position(end))


def state_of(loop: SinkLoop) -> tuple[Any, ...]:
    return rows_of(loop), parked_in(loop), records_of(loop)


@pytest.fixture(name="expected")
def _expected(log: Path, tmp_path: Path) -> dict[int, tuple[Any, ...]]:
    """End of a range → what the apply process leaves at it."""
    states = {}
    with loop_in(tmp_path / "here", log, None) as here:
        for end in (COPY, CHANGES):
            here(None, Position(end))
            states[end] = state_of(here)
    return states


def test_of_a_part_that_two_attempts_wrote_one_file_is_committed_and_the_other_is_removed_later(
    spark: SparkSession, log: Path, tmp_path: Path, expected: dict[int, tuple[Any, ...]]
) -> None:
    with loop_in(tmp_path / "lake", log, spark, TwiceRunLake.build) as loop:
        loop(spark, Position(COPY))
        assert state_of(loop) == expected[COPY]
        (table,) = loop.record.tables.values()
        uri = Path(table.target)
        committed = {Path(file).name for file in DeltaTable(uri).file_uris()}
        orphans = {file.name for file in uri.glob("*.parquet")} - committed
        assert (len(committed), len(orphans)) == (1, 1)

        clock = Clock()
        maintenance = TargetMaintenance(UpkeepSettings(every=1, vacuum_after=UNUSED_FOR), clock)
        (orphan,) = (uri / name for name in orphans)
        os.utime(orphan, (0, orphan.stat().st_mtime - UNKNOWN_FILE_AGE))
        for _ in range(3):
            clock.now += UNUSED_FOR
            target = DeltaTarget.open(table.target)
            assert target is not None
            cuts = PublishedTable.open(f"{tmp_path}/lake/lake/_cdc/published", LogReader(log).log_id).cuts
            maintenance.turn(cuts, {table.target: target})
        assert not orphan.exists()
        assert state_of(loop) == expected[COPY]


def test_a_client_that_commits_while_executors_merge_makes_the_driver_merge_again(
    spark: SparkSession, log: Path, tmp_path: Path, expected: dict[int, tuple[Any, ...]]
) -> None:
    uri, begun = f"{tmp_path}/lake/lake/shop/table1", tmp_path / "begun"

    def commit_first(task: Task, pieces: Iterator[Piece]) -> Iterator[pa.RecordBatch]:
        with suppress(FileExistsError):
            begun.touch(exist_ok=False)
            DeltaTable(uri).update({"more": "'of another client'"}, predicate="id = 1")
        return task(pieces)

    class OvertakenLake(FaultyLake):
        attempt = staticmethod(commit_first)

    apply_here(tmp_path, log, COPY)
    with loop_in(tmp_path / "lake", log, spark, OvertakenLake.build) as loop:
        loop(spark, Position(CHANGES))
        rows, parked, records = state_of(loop)
    assert begun.exists()
    right = [
        row | {"more": "of another client"} if row["id"] == 1 else row for row in expected[CHANGES][0]["shop.table1"]
    ]
    assert rows == {"shop.table1": right}
    assert (parked, records) == expected[CHANGES][1:]


@pytest.mark.parametrize("end", [COPY, CHANGES])
def test_of_two_drivers_whose_executors_write_the_same_range_the_slower_one_is_refused(
    spark: SparkSession, log: Path, tmp_path: Path, expected: dict[int, tuple[Any, ...]], end: int
) -> None:
    if end == CHANGES:
        apply_here(tmp_path, log, COPY)
    with loop_in(tmp_path / "lake", log, spark) as faster:

        class SlowerLake(FaultyLake):
            planned = staticmethod(lambda: faster(spark, Position(end)))

        with loop_in(tmp_path / "lake", log, spark, SlowerLake.build) as slower, pytest.raises(SinkFenced):
            slower(spark, Position(end))
        assert state_of(faster) == expected[end]
