"""Read tasks of a trimmed log with the option history: the state at the horizon, then every single change."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from cdc.errors import LogTrimmed
from cdc.log.compacted_table import read_compacted_state
from cdc.log.reader import LogReader, RowSpan, row_spans
from cdc.log.trim_plan import Retention, plan_trim
from cdc.position import Position
from pipelines.compaction.compaction_steps import CompactionLimits, compact
from pipelines.folding.fold import fold
from pipelines.source.data_source import LogStreamReader
from pipelines.source.read_tasks import divide_baseline, fold_share
from tests.pipelines.cold_log import append, histories, interleaved, log_writer, transactions
from tests.pipelines.fold_model import SINK, Row, to_arrow
from tests.pipelines.source.frame_rows import frame_of, frame_rows

NO_CONSUMERS = Retention(max_age=1.0, grace=3600.0)
HISTORY = {"history": "true"}
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40) if seed != 1)]


def trimmed_log(root: Path, seed: int) -> tuple[list[Row], Position]:
    """Write, compact and trim a random log; return (its rows, its horizon)."""
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
    trim = plan_trim(root, NO_CONSUMERS)
    assert trim is not None
    writer.trim(trim.segments, trim.upto)
    state = read_compacted_state(root)
    assert state is not None
    return rows, state.horizon


def images(rows: pa.Table, op: str) -> list[tuple[Any, ...]]:
    """Relation, key and sorted columns of the rows with an operation."""
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
def test_a_history_is_the_state_at_the_horizon_and_every_later_change(tmp_path: Path, seed: int) -> None:
    rows, horizon = trimmed_log(tmp_path, seed)
    whole = to_arrow(rows)
    early = whole.filter(pa.compute.less_equal(whole["position"], int(horizon)))
    late = whole.filter(pa.compute.greater(whole["position"], int(horizon)))
    shown = frame_rows(frame_of(tmp_path, **HISTORY))
    baseline = shown.filter(pa.compute.less_equal(shown["position"], int(horizon)))
    changes = shown.filter(pa.compute.greater(shown["position"], int(horizon)))

    assert images(baseline, "r") == images(fold(early, sink=SINK), "u")
    assert places(baseline, "s") == places(early, "s")
    keyed = [row for row in baseline.to_pylist() if row["key"]]
    assert {row["op"] for row in keyed} <= {"r"}
    assert places(changes, *"crudtgsm") == places(late, *"crudtgsm")


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_state_is_the_same_for_any_division_into_shares(tmp_path: Path, seed: int) -> None:
    _, horizon = trimmed_log(tmp_path, seed)
    files = LogReader(tmp_path).history(Position(0), LogReader(tmp_path).durable or Position(0)).baseline
    spans = [span for file in files for span in row_spans(file)]
    (whole,) = divide_baseline(files, spans, 1 << 40)
    expected = images(fold_share(whole, horizon), "r")
    for limit in (sum(span.size for span in spans) // pieces for pieces in (2, 9)):
        shares = divide_baseline(files, spans, limit)
        together = pa.concat_tables([fold_share(share, horizon) for share in shares])
        assert images(together, "r") == expected
        assert len(places(together, "s")) == len(set(places(together, "s")))


def test_a_large_relation_is_divided_by_key_and_small_ones_share_a_task() -> None:
    spans = [RowSpan(1, 9, 90), RowSpan(9, 12, 40), RowSpan(20, 20, 900), RowSpan(20, 31, 12), RowSpan(40, 40, 3)]
    shares = [(share.relations, share.part, share.parts) for share in divide_baseline([], spans, 100)]

    big = [share for share in shares if share[0] == (20, 20)]
    assert [part for _, part, _ in big] == list(range(10))
    bounds = sorted({relations for relations, _, _ in shares})
    assert bounds[0][0] == 1
    assert bounds[-1][1] == 40
    assert all(one[1] + 1 == other[0] for one, other in pairwise(bounds))
    assert len(bounds) < 6
    assert divide_baseline([], [], 100) == []


def test_a_stream_of_history_begins_with_the_state_and_continues_with_every_change(tmp_path: Path) -> None:
    rows, horizon = trimmed_log(tmp_path, 3)
    reader = LogStreamReader(frame_of(tmp_path, **HISTORY))
    end = reader.latestOffset({"position": 0}, ReadMaxRows(1))
    assert end["position"] == horizon

    at, seen = int(horizon), []
    while (to := reader.latestOffset({"position": at}, ReadMaxRows(1))["position"]) > at:
        seen += places(frame_rows(reader._frame, at, to), *"crudtgsm")
        at = to
    assert sorted(seen) == sorted((row["position"], row["ordinal"]) for row in rows if row["position"] > horizon)


def test_a_range_of_trimmed_changes_is_refused_with_the_oldest_position(tmp_path: Path) -> None:
    trimmed_log(tmp_path, 3)
    log = LogReader(tmp_path)
    assert log.oldest > 1
    for options in ({"startingPosition": "0/1"}, {"endingPosition": "0/1"}):
        with pytest.raises(LogTrimmed, match=str(log.oldest)):
            frame_rows(frame_of(tmp_path, **HISTORY, **options))
    with pytest.raises(LogTrimmed, match=str(log.oldest)):
        LogStreamReader(frame_of(tmp_path, **HISTORY)).latestOffset({"position": 1}, ReadAllAvailable())
    for options in ({"startingTimestamp": "1969-01-01"}, {"endingTimestamp": "1969-01-01"}):
        with pytest.raises(LogTrimmed, match=f"oldest change .* {log.oldest!s}"):
            frame_rows(frame_of(tmp_path, **options))


def test_a_history_of_some_tables_has_their_rows_of_the_whole_history(tmp_path: Path) -> None:
    for seed in (1,):
        root = tmp_path / str(seed)
        trimmed_log(root, seed)
        whole = frame_rows(frame_of(root, **HISTORY))
        for topic in sorted({topic for topic in whole["topic"].to_pylist() if topic}):
            own = whole.filter(pa.compute.equal(whole["topic"], topic))
            shown = frame_rows(frame_of(root, tables=topic, **HISTORY))
            assert places(shown, *"crudtgsm") == places(own, *"crudtgsm")
            assert images(shown, "r") == images(own, "r")
