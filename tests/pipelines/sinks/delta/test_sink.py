"""Delta sink: settings by rule, the count of rewritten bytes, and use before it is open."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc.config import SinkRule
from cdc.config.delta_sink import HistoryMode
from cdc.errors import SchemaNotApplicable
from pipelines.sinks.contract import Published, TargetState
from pipelines.sinks.delta.history_strategy import History
from pipelines.sinks.delta.latest_state_strategy import LatestState
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ID, ITEM, ORDERS, batch, put
from tests.contracts.histories import ALL_SETTINGS
from tests.pipelines.sinks.delta.test_sink_parts import settings_in


@pytest.mark.parametrize("writer", [Writer.COPY_ON_WRITE, Writer.INDEXED])
def test_what_a_batch_had_to_write_again_is_counted_and_what_it_added_is_not(tmp_path: Path, writer: Writer) -> None:
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", writer=writer))
    sink.open("log-1")
    rewritten = []
    first = [put(1, "a", 10), put(2, "b", 11)]
    for number, rows in enumerate([first, [put(3, "new", 30)], [put(1, "A", 50)], []]):
        record = sink.apply(batch(rows, number * 20, number * 20 + 20))
        sink.publish(Published(record.position, 0, {record.relation: record}))
        rewritten.append(sink.commit_rate.rewritten)
    sink.close()

    assert rewritten[0] == rewritten[1] == rewritten[3] == 0
    assert (rewritten[2] == 0) if writer is Writer.INDEXED else (0 < rewritten[2] < 10_000)


def test_bytes_that_another_writer_rewrites_in_an_indexed_target_are_counted(tmp_path: Path) -> None:
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", writer=Writer.INDEXED))
    sink.open("log-1")
    record = sink.apply(batch([put(1, "a", 10), put(2, "b", 10)], 0, 20))
    sink.publish(Published(record.position, 0, {record.relation: record}))
    # a truncate: delta-rs deletes the older rows
    record = sink.apply(batch([put(3, "c", 35)], 20, 40, truncated=(30, 0)))
    sink.publish(Published(record.position, 0, {record.relation: record}))
    sink.close()

    assert sink.commit_rate.rewritten > 0


@pytest.mark.parametrize("mode", ALL_SETTINGS)
def test_a_copy_in_one_batch_makes_a_target_with_two_commits(tmp_path: Path, mode: HistoryMode) -> None:
    sink = DeltaSink(settings_in(tmp_path, ALL_SETTINGS[mode]))
    sink.open("log-1")
    assert sink.target_position(ORDERS) == 0
    assert not (tmp_path / "shop").exists(), "only a batch creates the target"
    record = sink.apply(batch([put(1, "a", 10)], 0, 20, generation=5))
    sink.close()

    assert (record.version, record.state) == (1, TargetState.STREAMING)


def test_the_policy_of_a_rule_counts_for_its_tables(tmp_path):
    rules = (SinkRule.model_validate({"match": "shop.*", "schema_changes": "exception"}),)
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", rules=rules))
    sink.open("log-1")
    sink.apply(batch([put(1, "a", 10)], 0, 20))
    with pytest.raises(SchemaNotApplicable, match="exception"):
        sink.apply(batch(None, 20, 40, replace(ORDERS, columns=(ID, ITEM))))


def test_a_sink_publishes_only_while_it_is_open(tmp_path: Path) -> None:
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}"))
    with pytest.raises(ValueError, match="sink 'lake' is not open"):
        sink.publish(Published(10, 0, {}))
    assert sink.open("log-1") is None
    sink.publish(Published(10, 0, {}))
    sink.close()

    assert sink.open("log-1") == Published(10, 0, {})


def test_a_pinned_cut_names_the_version_of_each_target(tmp_path: Path) -> None:
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}"))
    sink.open("log-1")
    record = sink.apply(batch([put(1, "a", 10)], 0, 20))
    published = Published(20, 0, {record.relation: record})
    sink.publish(published)
    handle = sink.pin(published)
    sink.release(handle)
    sink.release("unknown")

    assert json.loads(handle) == {record.target: record.version}


@pytest.mark.parametrize("mode", ALL_SETTINGS)
def test_the_mode_of_a_table_chooses_its_strategy(tmp_path: Path, mode: HistoryMode) -> None:
    sink = DeltaSink(settings_in(tmp_path, ALL_SETTINGS[mode]))
    strategy = sink._strategy(ORDERS)
    latest = mode is HistoryMode.LATEST

    assert isinstance(strategy, LatestState if latest else History)
    assert strategy.replaced_by_copy == latest
    assert sink.keeps_history(ORDERS) != latest


@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize(
    "rule",
    [
        {"transform": {"where": "id > 1"}},
        {"transform": {"computed": {"twice": "id * 2"}}},
        {"transform": {"python": "rules:same"}},
        {"path": "/all", "merge_tables": True},
    ],
)
def test_executors_take_large_batches_whatever_the_rule_computes(
    spark: SparkSession, tmp_path: Path, rule: dict[str, Any]
) -> None:
    rules = (SinkRule.model_validate({"match": "shop.*", **rule}),)
    sink = DeltaSink(replace(settings_in(tmp_path, ALL_SETTINGS[HistoryMode.LATEST]), rules=rules), spark)

    assert sink.takes_parts(ORDERS)
