"""The compaction thread: it compacts at the interval and for commands, and reports failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc import metrics
from cdc.bucket_files import Root
from cdc.catalog import Catalog
from cdc.catalog.commands import COMPACT, Command, CommandState
from cdc.config import Definition
from cdc.config.views import View
from cdc.log.compacted_table import read_compacted_state
from cdc.log.disk_format import COMPACTED
from cdc.log.reader import LogReader
from cdc.log.trim_plan import REQUEST_FILE
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.compaction.compaction_steps import CompactionLimits, StartSpark
from pipelines.compaction.compaction_worker import CompactionWorker
from tests.fixtures.waiting import until
from tests.pipelines.cold_log import EACH_OF_ITS_OWN, folded, log_writer
from tests.pipelines.fold_model import Row
from tests.pipelines.shop_pipeline import END, ShopPipeline, copy_log, make_shop


@pytest.fixture
def ground(tmp_path: Path) -> ShopPipeline:
    """A log of several segments."""
    return make_shop(tmp_path, EACH_OF_ITS_OWN)


@pytest.fixture
def catalog(ground: ShopPipeline) -> Iterator[Catalog]:
    with Catalog.open(ground.definition.catalog.url) as catalog:
        yield catalog


def with_interval(ground: ShopPipeline, seconds: float) -> Definition:
    log = ground.definition.log
    compact = log.compact.model_copy(update={"every": seconds})
    return ground.definition.model_copy(update={"log": log.model_copy(update={"compact": compact})})


USUAL = CompactionLimits()


@contextmanager
def running_worker(
    definition: Definition,
    catalog: Catalog,
    figures: metrics.Metrics | None = None,
    spark: StartSpark = lambda: None,
    limits: CompactionLimits = USUAL,
) -> Iterator[None]:
    stop = Event()
    worker = CompactionWorker(definition, catalog, figures or metrics.Metrics(), spark, stop)
    worker.limits = limits
    with until_stopped(worker, stop):
        yield


@contextmanager
def worker_behind_sinks(
    definition: Definition, catalog: Catalog, sinks_catch_up: Callable[[], bool], longest_delay: float = 3600.0
) -> Iterator[None]:
    stop = Event()
    worker = CompactionWorker(definition, catalog, metrics.Metrics(), lambda: None, stop)
    worker.sinks_catch_up, worker.longest_delay = sinks_catch_up, longest_delay
    with until_stopped(worker, stop):
        yield


@contextmanager
def until_stopped(worker: CompactionWorker, stop: Event) -> Iterator[None]:
    worker.start()
    try:
        yield
    finally:
        stop.set()
        worker.join()


def post_compaction(catalog: Catalog, *, everything: bool) -> Command:
    number = catalog.commands.post("shop", COMPACT, {"everything": everything})

    def finished() -> Command | None:
        found = catalog.commands.get(number)
        return found if found is not None and found.state is not CommandState.PENDING else None

    return until(finished, "an answer")


def test_closed_segments_are_compacted_at_the_interval_and_trimmed(ground: ShopPipeline, catalog: Catalog) -> None:
    figures, root = metrics.Metrics(), Path(ground.definition.log.path)
    with running_worker(with_interval(ground, 0.01), catalog, figures):
        until(
            lambda: (state := read_compacted_state(root)) and state.horizon == END - 100,
            "all segments but the open one",
        )
        until((root / REQUEST_FILE).exists, "a request to trim")
    values = {sample.metric: sample.value for sample in figures}
    assert values[metrics.LOG_HORIZON] == END - 100
    assert values[metrics.COMPACTED_ROWS] > 0
    assert values[metrics.COMPACTION_CHANGES] == values[metrics.COMPACTED_ROWS]
    assert values[metrics.COMPACTION_SECONDS] > 0
    assert values[metrics.COMPACTED_BYTES] > 0
    assert values[metrics.LOG_OLDEST] == 0


def test_the_interval_waits_until_the_sinks_have_caught_up(ground: ShopPipeline, catalog: Catalog) -> None:
    caught_up, root = Event(), Path(ground.definition.log.path)
    answers: list[bool] = []

    def sinks_catch_up() -> bool:
        answers.append(not caught_up.is_set())
        return answers[-1]

    with worker_behind_sinks(with_interval(ground, 0.01), catalog, sinks_catch_up):
        until(lambda: len(answers) > 2, "several checks")
        assert read_compacted_state(root) is None
        caught_up.set()
        until(lambda: read_compacted_state(root), "a compaction")


def test_the_interval_waits_no_longer_than_the_longest_delay(ground: ShopPipeline, catalog: Catalog) -> None:
    root = Path(ground.definition.log.path)
    with worker_behind_sinks(with_interval(ground, 0.01), catalog, lambda: True, longest_delay=0.01):
        until(lambda: read_compacted_state(root), "a compaction")


def test_a_command_does_not_wait_for_the_sinks(ground: ShopPipeline, catalog: Catalog) -> None:
    with worker_behind_sinks(with_interval(ground, 0.01), catalog, lambda: True):
        assert post_compaction(catalog, everything=False).state is CommandState.DONE


def test_a_command_is_answered_with_the_result(ground: ShopPipeline, catalog: Catalog) -> None:
    with running_worker(with_interval(ground, 0.0), catalog):
        said = post_compaction(catalog, everything=False)
        assert said.result is not None
        assert (said.state, said.result["outcome"]["horizon"]) == (CommandState.DONE, "0/514")
        again = post_compaction(catalog, everything=True)
        assert again.result is not None
        assert again.result["outcome"]["horizon"] == "0/578"


def test_spark_workers_compact_large_ranges(ground: ShopPipeline, catalog: Catalog, spark: SparkSession) -> None:
    root = ground.definition.log.root
    right = rows_of(root)
    asked: list[SparkSession] = []

    def session() -> SparkSession:
        asked.append(spark)
        return spark

    with running_worker(with_interval(ground, 0.0), catalog, spark=session, limits=CompactionLimits(large=0, parts=2)):
        said = [post_compaction(catalog, everything=False), post_compaction(catalog, everything=True)]
    assert [command.state for command in said] == [CommandState.DONE] * 2
    assert [command.result["outcome"]["horizon"] for command in said if command.result] == ["0/514", "0/578"]
    state = read_compacted_state(root)
    assert state is not None
    assert len(asked) == 2
    assert min(len(run.files) for run in state.runs[:1]) > 1
    trim_all(root)
    assert LogReader(root).oldest > 0
    assert rows_of(root) == right


def rows_of(root: Root) -> list[Row]:
    log = LogReader(root)
    return folded(pa.Table.from_batches(log.rows(Position(0), log.durable or Position(0)), LOG_SCHEMA))


def trim_all(root: Root) -> None:
    """Trim every segment except the newest."""
    segments = LogReader(root).segments()[:-1]
    log_writer(root).trim({segment.segment for segment in segments}, max(segment.last for segment in segments))


def test_a_failed_compaction_is_reported_and_tried_again(ground: ShopPipeline, catalog: Catalog) -> None:
    figures, place = metrics.Metrics(), Path(ground.definition.log.path) / COMPACTED
    place.write_text("in the way")
    with running_worker(with_interval(ground, 0.01), catalog, figures):
        said = post_compaction(catalog, everything=False)
        assert said.state is CommandState.FAILED
        assert said.result is not None
        assert said.result["error"]["code"].startswith("CDC-4")
        place.unlink()
        until(lambda: read_compacted_state(place.parent), "a compaction after all")
    assert metrics.ERRORS in {sample.metric for sample in figures}


def test_the_log_of_views_is_compacted_once_it_exists(ground: ShopPipeline, catalog: Catalog) -> None:
    view = View(name="shop.names", key=("id",), sql="SELECT id, name FROM shop.item")
    definition = with_interval(ground, 0.01).model_copy(update={"views": (view,)})
    figures, place, made = metrics.Metrics(), Path(str(definition.log.of_views)), ground.folder / "made"
    with running_worker(definition, catalog, figures):
        until(lambda: read_compacted_state(definition.log.root), "the change log without a log of views")
        post_compaction(catalog, everything=False)  # answered in the round after the one that looked for a log of views
        assert metrics.ERRORS not in {sample.metric for sample in figures}
        copy_log(made, EACH_OF_ITS_OWN)
        made.rename(place)  # a worker never sees half a log
        until(lambda: read_compacted_state(place), "the log of views")
        until((place / REQUEST_FILE).exists, "a request to trim the log of views")
