"""history=true: the state at a cut as rows that were read, then every change, however much of the log is gone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from cdc.errors import LogTrimmed
from cdc.log import retention_worker
from cdc.log.compacted_state import read_compacted_state
from cdc.log.reader import LogReader, RowSpan, row_spans
from cdc.log.retention import Retention
from cdc.position import Position
from pipelines.compaction.compact import CompactionLimits, compact
from pipelines.folding.fold import fold
from pipelines.source.data_source import LogStreamReader
from pipelines.source.history_start import folded, shares
from tests.pipelines.cold_log import append, histories, interleaved, log_writer, transactions
from tests.pipelines.frames_of import found, frame_of
from tests.pipelines.lives import SINK, Row, to_arrow

NOBODY = Retention(max_age=1.0, grace=3600.0)
HISTORY = {"history": "true"}
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))]


def trimmed_log(root: Path, seed: int) -> tuple[list[Row], Position]:
    """A random log that was compacted again and again and then trimmed; what was written, and the horizon."""
    random = Random(seed)
    rows = [row | {"topic": f"shop.table{row['relation']}"} for row in interleaved(histories(seed, 3))]
    writer, several = log_writer(root), transactions(rows)
    while several:
        count = random.randint(1, max(1, len(several) // 2))
        append(writer, several[:count])
        several = several[count:]
        if several and random.random() < 0.7:
            compact(None, root, everything=True, limits=CompactionLimits(parts=random.choice([1, 3])))
    if read_compacted_state(root) is None:
        compact(None, root, everything=True)
    trim = retention_worker.plan_trim(root, NOBODY)
    assert trim is not None
    writer.trim(trim.segments, trim.upto)
    held = read_compacted_state(root)
    assert held is not None
    return rows, held.horizon


def images(rows: pa.Table, op: str) -> list[tuple[Any, ...]]:
    """Key and columns of the rows with an operation, in an order of theirs."""
    listed = rows.to_pylist(maps_as_pydicts="strict")
    return sorted(
        (
            (row["relation"], row["key"], sorted(row["after"].items()))
            for row in listed
            if row["op"] == op and row["key"]
        ),
        key=repr,
    )


def places(rows: pa.Table, *operations: str) -> list[tuple[int, int]]:
    return sorted((r["position"], r["ordinal"]) for r in rows.to_pylist() if r["op"] in operations)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_the_state_at_the_horizon_and_every_change_behind_it(tmp_path: Path, seed: int) -> None:
    rows, horizon = trimmed_log(tmp_path, seed)
    whole = to_arrow(rows)
    early = whole.filter(pa.compute.less_equal(whole["position"], int(horizon)))
    late = whole.filter(pa.compute.greater(whole["position"], int(horizon)))
    shown = found(frame_of(tmp_path, **HISTORY))
    baseline = shown.filter(pa.compute.less_equal(shown["position"], int(horizon)))
    changes = shown.filter(pa.compute.greater(shown["position"], int(horizon)))

    assert images(baseline, "r") == images(fold(early, sink=SINK), "u")
    assert places(baseline, "s") == places(early, "s")
    keyed = [row for row in baseline.to_pylist() if row["key"]]
    assert {row["op"] for row in keyed} <= {"r"}
    assert places(changes, *"crudtgsm") == places(late, *"crudtgsm")


@pytest.mark.parametrize("seed", [1, 2])
def test_however_it_is_dealt_out_the_state_is_the_same(tmp_path: Path, seed: int) -> None:
    _, horizon = trimmed_log(tmp_path, seed)
    files = LogReader(tmp_path).history(Position(0), LogReader(tmp_path).durable or Position(0)).baseline
    lies = [extent for file in files for extent in row_spans(file)]
    (whole,) = shares(files, lies, 1 << 40)
    expected = images(folded(whole, horizon), "r")
    for limit in (sum(extent.size for extent in lies) // pieces for pieces in (2, 9)):
        dealt = shares(files, lies, limit)
        together = pa.concat_tables([folded(share, horizon) for share in dealt])
        assert images(together, "r") == expected
        assert len(places(together, "s")) == len(set(places(together, "s")))


def test_a_relation_above_the_limit_is_dealt_by_key_and_small_ones_are_together() -> None:
    lies = [RowSpan(1, 9, 90), RowSpan(9, 12, 40), RowSpan(20, 20, 900), RowSpan(20, 31, 12), RowSpan(40, 40, 3)]
    dealt = [(share.relations, share.part, share.parts) for share in shares([], lies, 100)]

    big = [share for share in dealt if share[0] == (20, 20)]
    assert [part for _, part, _ in big] == list(range(10))
    bounds = sorted({relations for relations, _, _ in dealt})
    assert bounds[0][0] == 1
    assert bounds[-1][1] == 40
    assert all(one[1] + 1 == other[0] for one, other in pairwise(bounds))
    assert len(bounds) < 6
    assert shares([], [], 100) == []


def test_a_stream_of_history_begins_with_the_state_and_goes_on_with_every_change(tmp_path: Path) -> None:
    rows, horizon = trimmed_log(tmp_path, 3)
    reader = LogStreamReader(frame_of(tmp_path, **HISTORY))
    end = reader.latestOffset({"position": 0}, ReadMaxRows(1))
    assert end["position"] == horizon

    at, seen = int(horizon), []
    while (to := reader.latestOffset({"position": at}, ReadMaxRows(1))["position"]) > at:
        seen += places(found(reader._frame, at, to), *"crudtgsm")
        at = to
    assert sorted(seen) == sorted((row["position"], row["ordinal"]) for row in rows if row["position"] > horizon)


def test_changes_that_are_gone_are_refused_and_the_oldest_position_is_named(tmp_path: Path) -> None:
    trimmed_log(tmp_path, 3)
    log = LogReader(tmp_path)
    assert log.oldest > 1
    for asked in ({"startingPosition": "0/1"}, {"endingPosition": "0/1"}):
        with pytest.raises(LogTrimmed, match=str(log.oldest)):
            found(frame_of(tmp_path, **HISTORY, **asked))
    with pytest.raises(LogTrimmed, match=str(log.oldest)):
        LogStreamReader(frame_of(tmp_path, **HISTORY)).latestOffset({"position": 1}, ReadAllAvailable())
    for asked in ({"startingTimestamp": "1969-01-01"}, {"endingTimestamp": "1969-01-01"}):
        with pytest.raises(LogTrimmed, match=f"oldest change .* {log.oldest!s}"):
            found(frame_of(tmp_path, **asked))


def test_of_chosen_tables_it_has_the_rows_that_the_whole_has(tmp_path: Path) -> None:
    for seed in (1, 4):
        root = tmp_path / str(seed)
        trimmed_log(root, seed)
        whole = found(frame_of(root, **HISTORY))
        for topic in sorted({topic for topic in whole["topic"].to_pylist() if topic}):
            own = whole.filter(pa.compute.equal(whole["topic"], topic))
            shown = found(frame_of(root, tables=topic, **HISTORY))
            assert places(shown, *"crudtgsm") == places(own, *"crudtgsm")
            assert images(shown, "r") == images(own, "r")
