"""A thread that computes views: its jobs have a pool of their own, and end when it is closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pipelines.views.view_computation import ViewComputation
from pipelines.views.view_inputs import ViewInputs
from pipelines.views.view_thread import POOL, ViewThread
from tests.fixtures.one_table_lake import OneTableLake
from tests.fixtures.spark import compiling
from tests.fixtures.waiting import until

ENDLESS = "SELECT count(*) AS n FROM range(0, 1000000000000, 1, 2) WHERE hash(id) = 0"


class Computing:
    """Runs a function as a computation."""

    def __init__(self, act: Callable[[ViewInputs], Any]) -> None:
        self.is_stopped, self.found, self._act = Event(), list[Any](), act

    def discard(self) -> None:
        self.found.clear()

    def run(self, inputs: ViewInputs) -> None:
        self.found.append(self._act(inputs))


@pytest.fixture(name="thread")
def _thread(spark: SparkSession, tmp_path: Path) -> Iterator[ViewThread]:
    made = ViewThread(compiling(spark), OneTableLake(tmp_path).definition)
    yield made
    made.close()


def started(thread: ViewThread, act: Callable[[ViewInputs], Any]) -> Computing:
    computing = Computing(act)
    thread.start(cast("ViewComputation", computing))
    return computing


def test_it_computes_one_after_another_in_the_pool_of_views(thread: ViewThread) -> None:
    for sql in ("SELECT 1 AS n", "SELECT 2 AS n"):
        computing = started(thread, lambda inputs, sql=sql: inputs.rows(sql).to_pylist())  # type: ignore[misc]
        assert thread.has_ended(None)
        assert thread.result() is thread.computation
        assert computing.found == [[{"n": int(sql[7])}]]
    computing = started(thread, lambda inputs: inputs.session.sparkContext.getLocalProperty("spark.scheduler.pool"))
    assert thread.has_ended(None)
    assert computing.found == [POOL]


def test_an_error_is_raised_where_the_result_is_taken(thread: ViewThread) -> None:
    started(thread, lambda inputs: inputs.rows("SELECT nothing"))
    assert thread.has_ended(None)
    with pytest.raises(PySparkException, match="nothing"):
        thread.result()


def test_closing_it_ends_its_job(thread: ViewThread, spark: SparkSession) -> None:
    begun = Event()

    def act(inputs: ViewInputs) -> object:
        begun.set()
        return inputs.rows(ENDLESS)

    computing = started(thread, act)
    assert begun.wait(60)
    assert not thread.has_ended(0.5)
    thread.close()
    assert computing.is_stopped.is_set()
    assert not computing.found
    assert thread.has_ended()
    assert spark.range(3).count() == 3


def test_a_short_computation_does_not_wait_for_a_long_one(
    thread: ViewThread, spark: SparkSession, tmp_path: Path
) -> None:
    other = ViewThread(compiling(spark), OneTableLake(tmp_path / "other").definition)
    started(thread, lambda inputs: inputs.rows(ENDLESS.replace("1, 2", "1, 2000")))
    tracker = spark.sparkContext.statusTracker()

    def runs() -> bool:
        stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
        return any(stage is not None and stage.numTasks == 2_000 and stage.numActiveTasks for stage in stages)

    until(runs, "the long computation")
    computing = started(other, lambda inputs: inputs.rows("SELECT count(*) AS n FROM range(0, 10, 1, 2)").to_pylist())
    assert other.has_ended(60)
    assert computing.found == [[{"n": 10}]]
    assert not thread.has_ended()
    other.close()
