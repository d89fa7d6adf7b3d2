"""The step in which executors apply the whole log to a new sink: its definition, and the comparison with the lake."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest

from cdc.config import EngineChoice, TableSettings, load_definition
from cdc.demo.executor_step import ExecutorStep, SparkBatches
from cdc.demo.pipeline_observer import LAKE
from cdc.demo.terminal import Terminal
from cdc.demo.workspace import BACKLOG, BACKLOG_PIPELINE, Workspace
from tests.demo.test_sink_steps import fill
from tests.log.rows import schema_of
from tests.pipelines.cold_log import append, log_writer
from tests.pipelines.fold_model import log_row

APPLIED = SparkBatches(batches=1, rows=1, seconds=0.5)


@pytest.mark.parametrize("with_views", [False, True])
def test_the_sink_has_the_whole_log_as_its_backlog_and_every_batch_is_for_spark(
    tmp_path: Path, *, with_views: bool
) -> None:
    workspace = Workspace(tmp_path)
    workspace.define("postgresql://nobody@127.0.0.1/none", 8083, (), with_views=with_views)
    workspace.add_history()
    definition = load_definition(workspace.define_backlog())
    assert (definition.name, [sink.name for sink in definition.sinks]) == (BACKLOG_PIPELINE, [BACKLOG])
    assert definition.spark.engine is EngineChoice.SPARK
    assert definition.log.compact.every == 0.0
    assert definition.spark.checkpoint == str(workspace.state / "checkpoints")
    assert definition.spark.conf
    assert not Path(definition.log.path).exists()
    workspace.log.mkdir()
    workspace.offer_log()
    assert Path(definition.log.path).samefile(workspace.log)


@pytest.mark.parametrize(
    ("price", "applied", "equal"),
    [("2.00", APPLIED, True), ("3.00", APPLIED, False), ("2.00", SparkBatches(0, 0, 0.0), False)],
)
def test_the_step_shows_the_rate_and_fails_where_the_rows_differ_or_spark_did_nothing(
    tmp_path: Path, price: str, applied: SparkBatches, *, equal: bool
) -> None:
    workspace = Workspace(tmp_path)
    append(log_writer(workspace.log), [[log_row(1, (9, 0), "s", payload=schema_of(1, "plain").to_json())]])
    lake = fill(workspace, LAKE, TableSettings(), ["1.00", "2.00"])
    fill(workspace, BACKLOG, TableSettings(), ["1.00", price])
    found = ExecutorStep(lake, Terminal(StringIO()), "").compare_now(applied)
    assert found.equal is equal
    assert ("NOT EQUAL" in found.text) is (price == "3.00")
    if applied.batches:
        assert "1 changes in 0.5 s (2/s) → 1 rows of 1 tables" in found.text
