"""A stream that was killed in a batch from the beginning reads the same batch again, however the log was compacted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from cdc.errors import LogTrimmed
from cdc.log import consumers
from cdc.log.compacted_table import CompactedState, read_compacted_state
from cdc.log.consumers import Consumer
from cdc.log.reader import LogReader
from cdc.log.trim_plan import Retention, plan_trim
from cdc.log.vacuum import vacuum
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from pipelines.source.data_source import LogStreamReader
from tests.pipelines.cold_log import append, folded, log_writer
from tests.pipelines.fold_model import Row, log_row, to_arrow
from tests.pipelines.source.frame_rows import frame_of

PATIENCE = 120  # seconds for a query that ends by itself
KEYS = 3
KEPT, SWEPT = Retention(max_age=1.0, grace=3600.0), Retention(max_age=1.0, grace=0.0)
"""Both wait for nobody: the log's commits are of 1970."""
ANNOUNCED = 14
"""Where the first batch ends."""


class Life:
    """A log of one table that changes, is compacted and trimmed; every transaction has a segment of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.rows, self._there = root, list[Row](), set[str]()
        self._writer = log_writer(root)

    def grow(self, upto: int) -> None:
        """Changes up to a position: updates, some of one column alone, and deletes."""
        for place in range(len(self.rows) + 1, upto + 1):
            key, op = str(place % KEYS), "u"
            after: dict[int, str] | None = {1: key, 2: f"v{place}", 3: "x" * place}
            if place % 5 == 1:
                op, after = "d", None
            elif place % 5 == 3 and key in self._there:
                after = {1: key, 2: f"v{place}"}
            (self._there.discard if after is None else self._there.add)(key)
            partial = after is not None and len(after) < 3
            self.rows.append(log_row(1, (place, 0), op, key=[key], after=after, partial=partial))
            append(self._writer, [self.rows[-1:]])

    def compact(self) -> CompactedState:
        """All there is; and trim what nobody waits for."""
        compact(None, self.root, everything=True)
        if (trim := plan_trim(self.root, KEPT)) is not None:
            self._writer.trim(trim.segments, trim.upto)
        held = read_compacted_state(self.root)
        assert held is not None
        return held


@pytest.fixture(name="life")
def _life(tmp_path: Path) -> Life:
    """Compacted up to where the first batch ends, with some changes behind."""
    life = Life(tmp_path / "log")
    life.grow(ANNOUNCED)
    life.compact()
    life.grow(ANNOUNCED + 5)
    return life


def started(life: Life, **options: str) -> LogStreamReader:
    """A planner that knows nothing."""
    return LogStreamReader(frame_of(life.root, **options))


def announced(life: Life, **options: str) -> dict[str, int]:
    """The end of the first batch, which knows no limit."""
    return started(life, **options).latestOffset({"position": 0}, ReadAllAvailable())


def read(planner: LogStreamReader, end: dict[str, int], start: int = 0) -> pa.Table:
    """The rows of a batch."""
    parts = planner.partitions({"position": start}, end)
    rows = pa.Table.from_batches([rows for part in parts for rows in planner.read(part)]).cast(LOG_SCHEMA)
    return rows.sort_by([("position", "ascending")])


def compacted_again(life: Life) -> None:
    """Often enough for runs to be merged, so that what the first batch was read from leaves the table."""
    before = read_compacted_state(life.root)
    for upto in (2 * ANNOUNCED, 3 * ANNOUNCED):
        life.grow(upto)
        after = life.compact()
    assert before is not None
    assert LogReader(life.root).oldest > before.horizon
    assert not {file.path for file in before.files} & {file.path for file in after.files}


def test_an_announced_batch_stays_as_it_was_while_its_files_lie_there_and_the_stream_goes_on_behind_it(
    life: Life,
) -> None:
    ends = {history: announced(life, history=history) for history in ("false", "true")}
    before = {history: read(started(life, history=history), end) for history, end in ends.items()}
    for history, end in ends.items():
        assert (end["position"], before[history]["position"][-1].as_py()) == (ANNOUNCED, ANNOUNCED)
    unnamed = {"position": ANNOUNCED}  # as an older version announced it
    assert read(started(life), unnamed) == before["false"]
    compacted_again(life)

    for history, end in ends.items():
        assert read(started(life, history=history), end) == before[history]
    planner, at = started(life), ends["false"]
    parts = [read(planner, at)]
    while (to := planner.latestOffset(at, ReadAllAvailable())) != at:
        parts.append(read(planner, to, at["position"]))
        at = to
    assert len(parts) == 2
    assert folded(*parts) == folded(to_arrow(life.rows))
    with pytest.raises(LogTrimmed, match="cannot be read up to"):
        started(life).partitions({"position": 0}, unnamed)
    vacuum(life.root, SWEPT)
    with pytest.raises(LogTrimmed, match="cannot be read up to"):
        started(life).partitions({"position": 0}, ends["false"])


def test_a_history_goes_on_behind_it_while_somebody_keeps_the_changes(life: Life) -> None:
    consumers.register(life.root, Consumer("lake", "lake", Position(ANNOUNCED)))
    end = announced(life, history="true")
    before = read(started(life, history="true"), end)
    life.grow(2 * ANNOUNCED)
    compact(None, life.root, everything=True)
    planner = started(life, history="true")

    assert read(planner, end) == before
    then = planner.latestOffset(end, ReadAllAvailable())
    assert read(planner, then, ANNOUNCED)["position"].to_pylist() == list(range(ANNOUNCED + 1, 2 * ANNOUNCED + 1))


def test_an_offset_that_names_a_version_is_no_reason_for_another_batch(life: Life) -> None:
    end = announced(life, boundaries="true")
    planner = started(life, boundaries="true")
    last = planner.latestOffset(end, ReadAllAvailable())
    assert last == {"position": ANNOUNCED + 5}
    assert planner.latestOffset(last, ReadAllAvailable()) == last
    assert planner.latestOffset({**last, "compacted": 1}, ReadAllAvailable()) == {**last, "compacted": 1}


@pytest.mark.slow
def test_spark_repeats_the_batch_that_a_query_died_in(spark: SparkSession, life: Life, tmp_path: Path) -> None:
    seen: list[pa.Table] = []

    def dies(rows: DataFrame, _: Any) -> None:
        keeps(rows, _)
        raise RuntimeError("killed")

    def keeps(rows: DataFrame, _: Any) -> None:
        seen.append(rows.toArrow().cast(LOG_SCHEMA).sort_by([("position", "ascending")]))

    with pytest.raises(StreamingQueryException, match="killed"):
        run(spark, life.root, tmp_path, dies)
    compacted_again(life)
    run(spark, life.root, tmp_path, keeps)

    died, again, *_ = seen
    assert again == died
    assert folded(*seen[1:]) == folded(to_arrow(life.rows))


def run(spark: SparkSession, root: Path, folder: Path, see: Callable[[DataFrame, Any], None]) -> None:
    rows = spark.readStream.format("cdc").option("path", str(root)).load()
    query = rows.writeStream.foreachBatch(see).option("checkpointLocation", str(folder / "cp"))
    assert query.trigger(availableNow=True).start().awaitTermination(PATIENCE)
