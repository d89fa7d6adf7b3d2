"""One computation of a view: it is stopped between slices, and says what was removed meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.errors import SinkUnavailable
from cdc.log.computed_views import ComputedView
from pipelines.views.view_computation import (
    INCREMENTAL,
    WHOLE,
    ComputationLimits,
    ComputationStopped,
    ViewComputation,
    ViewTask,
)
from tests.pipelines.views.test_view_engine import TOTALS, filled, opened
from tests.pipelines.views.view_pipeline import SOURCE, ViewPipeline

pytestmark = [pytest.mark.usefixtures("with_delta"), pytest.mark.slow]


def task_of(shop: ViewPipeline) -> ViewTask:
    """What the engine computes of the view at the present cut."""
    record, made = shop.publish(), list[ViewTask]()
    start = shop.engine._start

    def kept(task: ViewTask) -> object:
        made.append(task)
        return start(task)

    shop.engine._start = kept  # type: ignore[assignment, method-assign]
    shop.engine.advance(record, SOURCE)
    return made[0]


def removed(version: ComputedView) -> ComputedView:
    return replace(version, inputs={topic: replace(one, version=99) for topic, one in version.inputs.items()})


def test_a_computation_ends_at_the_next_slice_when_it_is_stopped(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, TOTALS) as shop:
        filled(shop)
        shop.compute()
        shop.write(("shop.customers", "u", ("2", "Bo")))
        slices: list[int | None] = []
        task = replace(
            task_of(shop),
            limits=ComputationLimits(keys_at_once=1),
            on_slice=lambda _, work: slices.append(work.keys_left),
        )
        inputs = shop.engine._idle[0].inputs
        computation = ViewComputation(task)
        computation.run(inputs)
        assert (slices, computation.work.mode, computation.work.affected_keys) == ([2, 1, 0], INCREMENTAL, 3)

        stopped = ViewComputation(replace(task, on_slice=lambda _view, _work: stopped.is_stopped.set()))
        with pytest.raises(ComputationStopped):
            stopped.run(inputs)
        assert list(stopped._rows.take()) == []


def test_removed_rows_are_an_error_only_where_no_other_way_is_left(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, TOTALS) as shop:
        filled(shop)
        shop.compute()
        shop.write(("shop.customers", "u", ("2", "Bo")))
        task, inputs = task_of(shop), shop.engine._idle[0].inputs
        assert task.earlier is not None
        computation = ViewComputation(replace(task, earlier=removed(task.earlier)))
        computation.run(inputs)
        assert computation.work.mode == WHOLE
        for changes in (None, task.changes):
            lost = ViewComputation(
                replace(task, earlier=removed(task.earlier), result=removed(task.result), changes=changes)
            )
            with pytest.raises(SinkUnavailable, match=r"view 'shop\.v_totals' reads was removed meanwhile"):
                lost.run(inputs)
