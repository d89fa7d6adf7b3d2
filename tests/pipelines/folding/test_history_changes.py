"""Tables whose history is kept: through the loop, built again, and from a log whose beginning is compacted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from cdc.catalog import Catalog
from cdc.config import DeltaSinkDefinition
from cdc.log.file_selection import TableSelection
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.lake_reader import read_target
from cdc.targets.published_record import Published, TargetState
from pipelines.engine_decision import EngineLimits
from pipelines.folding.executor_fold import LogRange
from pipelines.folding.folded_batch import FoldedBatch
from pipelines.folding.history_changes import fold_with_history
from pipelines.range_folder import RangeFolder
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.rebuild import LogSource, Rebuild, RebuildContext
from pipelines.replaying.replay import replay
from pipelines.replaying.table_sizes_in_log import read_contents
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.delta.delta_target import ROWS, DeltaTarget, TxnMarker
from tests.contracts.histories import in_order
from tests.pipelines.fold_model import log_row, to_arrow
from tests.pipelines.shop_pipeline import END, FIGURES, ORDERS, ShopPipeline, make_shop
from tests.pipelines.trimmed_log import NOBODY, TrimmedAndWholeLog

RULES: list[dict[str, Any]] = [
    {"match": "shop.orders", "stored_as_scd_type": 2},
    {"match": "shop.items", "mode": "append"},
]
MARKED: list[dict[str, Any]] = [{"match": "*.*", "mode": "soft_delete"}]


def wanted(folder: Path, name: str, rules: list[dict[str, Any]]) -> DeltaSinkDefinition:
    said = {"type": "delta", "name": name, "path": f"{folder}/{name}/{{schema}}/{{table}}", "rules": rules}
    return DeltaSinkDefinition.model_validate(said)


def applied(ground: ShopPipeline, asked: DeltaSinkDefinition, ends: list[int]) -> Published:
    """The sink brought to each of the ends as the apply process does it."""
    log, sink = LogReader(ground.folder / "log"), build_sink(asked)
    with Catalog.open(ground.definition.catalog.url) as catalog:
        fold = RangeFolder(log, asked.name, asked.tables, asked.keeps_history)
        loop = SinkLoop(sink, fold, CutRequests(catalog, "shop"), SinkFigures("shop", asked.name, FIGURES))
        loop.open()
        for end in ends:
            loop(None, Position(end))
        loop.drain()
        published = sink.open(log.log_id)
        sink.close()
    assert published is not None
    return published


def rebuilt(ground: ShopPipeline, asked: DeltaSinkDefinition, means: RebuildContext | None = None) -> Published:
    """The sink built again from the log."""
    log, sink = LogReader(ground.folder / "log"), build_sink(asked)
    upto = Position(log.durable or 0)
    sink.open(log.log_id)
    source = LogSource(log, asked.name, asked.tables, asked.keeps_history)
    alone = RebuildContext(spark=lambda: pytest.fail("no Spark is needed"), executors_can_write=lambda: False)
    built = Rebuild(source, sink, means or alone)(read_contents(log, upto, sink=asked.name, globs=asked.tables), upto)
    sink.close()
    return built


def tables(published: Published) -> dict[str, list[dict[str, Any]]]:
    """Rows by table, in one order."""
    records = published.tables.values()
    return {r.topic: sorted(read_target(r.target, None).read_all().to_pylist(), key=repr) for r in records}


def test_a_sink_keeps_one_table_as_versions_and_another_as_every_change_also_when_built_anew(tmp_path: Path) -> None:
    ground = make_shop(tmp_path / "shop")
    published = applied(ground, wanted(tmp_path, "lake", RULES), [1_100, 1_300, END])
    found = tables(published)

    assert {record.state for record in published.tables.values()} == {TargetState.STREAMING}
    versions = [(r["id"], r["note"], r["__START_AT"], r["__END_AT"]) for r in found["shop.orders"] if r["id"] in (1, 2)]
    assert sorted(versions, key=repr) == sorted(
        [
            (1, "o1", 1_000, 1_100),
            (1, "new", 1_100, END),
            (1, "newest", END, None),
            (2, "o2", 1_000, 1_100),
            (2, "back", 1_200, None),
        ],
        key=repr,
    )
    moved = [(r["id"], r["note"], r["__START_AT"], r["__END_AT"]) for r in found["shop.orders"] if r["id"] in (4, 104)]
    assert moved == [(104, "o4", 1_200, None), (4, "o4", 1_000, 1_200)]
    late = [(r["_op"], r["id"], r["note"]) for r in found["shop.items"] if r["_position"] > 1_000]
    assert sorted(late, key=repr) == [("c", 7, "after"), ("c", 8, "too"), ("t", None, None), ("u", 7, "later")]
    (end,) = [r for r in found["shop.items"] if r["_op"] == "g"]
    assert end["_generation"] == 1_000
    assert tables(rebuilt(ground, wanted(tmp_path, "again", RULES))) == found


def test_a_target_with_marked_rows_that_is_built_anew_is_the_one_that_was_applied(tmp_path: Path) -> None:
    ground = make_shop(tmp_path / "shop")
    found = tables(applied(ground, wanted(tmp_path, "lake", MARKED), [1_100, 1_300, END]))
    assert tables(rebuilt(ground, wanted(tmp_path, "again", MARKED))) == found


def in_mode(ground: ShopPipeline, rules: list[dict[str, Any]]) -> ShopPipeline:
    """The same pipeline, with other rules of its Delta sink."""
    sink = wanted(ground.folder, "lake", rules)
    return replace(ground, definition=ground.definition.model_copy(update={"sinks": (sink,)}))


def test_a_replay_makes_another_mode_of_a_target_and_the_sink_goes_on_with_it(tmp_path: Path) -> None:
    ground = make_shop(tmp_path)
    ground.drive("lake", 1_100)
    changed = in_mode(ground, [{"match": "*.*", "stored_as_scd_type": 2}])
    (asked,) = changed.definition.sinks
    assert isinstance(asked, DeltaSinkDefinition)
    refused = applied(changed, asked, [1_200])
    assert "was created with mode 'scd1': expected 'scd2'" in str([table.reason for table in refused.tables.values()])

    for target in (DeltaTarget.open(record.target) for record in refused.tables.values()):
        assert (
            target is not None
        )  # as a driver leaves it that was killed behind its merge, further than the replay goes
        mark = TxnMarker(target.app_id + ROWS, END).properties
        target.table.create_write_transaction([], "append", target.table.schema(), commit_properties=mark)

    assert replay(changed.definition, ReplayOptions(sink="lake", end="0/4B0")).ok  # 1,200
    found = tables(applied(changed, asked, [1_300, END]))
    assert found == tables(rebuilt(ground, wanted(tmp_path, "again", asked.model_dump()["rules"])))

    assert replay(ground.definition, ReplayOptions(sink="lake")).ok
    assert [row["note"] for row in ground.lake()["shop.orders"] if row["id"] == 1] == ["newest"]


def test_a_history_begins_with_the_state_at_the_horizon_of_a_trimmed_log(tmp_path: Path) -> None:
    twins = TrimmedAndWholeLog(tmp_path)
    twins.append(5)
    horizon = int(twins.compact(NOBODY).horizon)
    end = twins.append(6)
    asked = wanted(tmp_path, "lake", [{"match": "*.*", "stored_as_scd_type": 2}])
    found = tables(applied(twins.cut, asked, [horizon, horizon + 30, end]))

    assert twins.oldest > 0
    expected = twins.expected()
    for topic, rows in found.items():
        current = [
            {name: row[name] for name in ("id", "note", "_position", "_ordinal")}
            for row in rows
            if row["__END_AT"] is None
        ]
        assert sorted(current, key=lambda row: row["id"]) == expected[topic]
        assert all(row["__END_AT"] > horizon for row in rows if row["__END_AT"] is not None)
        assert any(row["__END_AT"] is not None for row in rows)
    assert tables(rebuilt(twins.cut, wanted(tmp_path, "again", asked.model_dump()["rules"]))) == found


def test_a_sink_that_fell_behind_the_horizon_stops_and_does_not_go_on_with_a_gap(tmp_path: Path) -> None:
    twins = TrimmedAndWholeLog(tmp_path)
    asked = wanted(tmp_path, "lake", [{"match": "shop.orders", "stored_as_scd_type": 2}])
    early = applied(twins.cut, asked, [1_100])
    before = tables(early)["shop.orders"]
    twins.append(5)
    horizon = int(twins.compact(NOBODY).horizon)
    published = applied(twins.cut, asked, [horizon])

    by_topic = {record.topic: record for record in published.tables.values()}
    assert by_topic["shop.orders"].state == TargetState.FAILED
    assert "CDC-3016" in (by_topic["shop.orders"].reason or "")
    assert tables(published)["shop.orders"] == before
    assert by_topic["shop.items"].state == TargetState.STREAMING


def test_a_truncate_behind_the_horizon_does_not_hide_the_rows_with_which_a_history_begins() -> None:
    rows = [
        log_row(1, (2, 0), "r", key=["1"], after={1: "1"}),
        log_row(1, (3, 0), "t"),
        log_row(1, (4, 0), "r", key=["2"], after={1: "2"}),
        log_row(1, (8, 0), "t"),
        log_row(2, (4, 1), "r", key=["2"], after={1: "2"}),
        log_row(2, (8, 1), "t"),
    ]
    log, kept = to_arrow(rows), frozenset({1})
    folded = fold_with_history(log, kept, 5, sink="lake").to_pylist()
    assert sorted((row["relation"], row["position"], row["op"]) for row in folded) == [
        (1, 3, "t"),
        (1, 4, "r"),
        (1, 8, "t"),
        (2, 8, "t"),
    ]
    read = LogRange(
        files=(), after=Position(0), upto=Position(9), tables=TableSelection(), sink="lake", kept=kept, since=5
    )
    fences = read.fences(log.filter(pc.equal(log["op"], "t")))
    assert {relation: fence.position for relation, fence in fences.items()} == {1: 3, 2: 8}


def batches_equal(one: FoldedBatch, other: FoldedBatch) -> bool:
    """Whether two batches say the same, of rows in any order."""
    rows = [in_order(batch.images.to_pylist()) for batch in (one, other)]
    return rows[0] == rows[1] and (one.controls, one.since) == (other.controls, other.since)


@pytest.mark.slow
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_large_range_tells_what_a_small_one_does(tmp_path: Path, spark: SparkSession, trimmed: bool) -> None:
    twins = TrimmedAndWholeLog(tmp_path)
    twins.append(5)
    if trimmed:
        twins.compact(NOBODY)
    end = Position(twins.append(6))
    asked = wanted(tmp_path, "lake", [{"match": "shop.orders", "stored_as_scd_type": 2}])
    fold = RangeFolder(LogReader(twins.cut.folder / "log"), "lake", asked.tables, asked.keeps_history)
    small = fold(None, Position(0), end)
    fold.limits = EngineLimits(small_rows=0, here_bytes=0)
    assert batches_equal(fold(spark, Position(0), end), small)
    assert small.since == (fold.log.compacted.horizon if trimmed and fold.log.compacted else 0)


@pytest.mark.slow
def test_the_state_at_the_horizon_may_be_more_than_the_driver_holds(tmp_path: Path, spark: SparkSession) -> None:
    twins = TrimmedAndWholeLog(tmp_path)
    twins.append(5)
    horizon = int(twins.compact(NOBODY).horizon)
    end = twins.append(6)
    asked = wanted(tmp_path, "lake", [{"match": "*.*", "stored_as_scd_type": 2}])
    found = tables(applied(twins.cut, asked, [horizon, end]))
    rebuilding = wanted(tmp_path, "again", asked.model_dump()["rules"])
    means = RebuildContext(spark=lambda: spark, executors_can_write=lambda: False, large=1, part=10)
    assert tables(rebuilt(twins.cut, rebuilding, means)) == found


def test_a_table_that_stayed_behind_catches_up_in_parts(tmp_path: Path) -> None:
    ground = make_shop(tmp_path / "shop")
    asked = wanted(tmp_path, "lake", RULES)
    log = LogReader(ground.folder / "log")
    fold = RangeFolder(log, asked.name, asked.tables, asked.keeps_history)
    fold.limits = EngineLimits(small_rows=1)
    ends = [end for _, end in fold.slices(None, Position(1_000), Position(END), ORDERS)]
    assert ends == [1_100, 1_200, 1_300, END]
    for batch, _ in fold.slices(None, Position(1_000), Position(END), ORDERS):
        assert batch.relations in ([ORDERS], [])
