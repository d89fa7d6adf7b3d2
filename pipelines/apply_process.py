"""The apply process: one thread per sink, Spark when something needs it, signals and the way the process ends.

`sink_lifecycle.py` runs a single sink. Two apply processes may fill different sinks of one pipeline. If both processes
name the same sink, the second process waits until the first releases the lease (`runtime/sink_lease.py`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from threading import Event, Thread
from types import FrameType
from typing import Final

import structlog
from pyspark.sql import SparkSession

from cdc import metrics
from cdc.catalog import Catalog
from cdc.config import Definition
from cdc.config.field_types import is_remote
from cdc.errors import LogCorrupt, LogError, LogFormatUnknown, LogInaccessible, as_cdc_error
from cdc.log.reader import LogReader
from pipelines.compaction.compaction_worker import CompactionWorker
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.replay_pause import ReplayPauses
from pipelines.runtime.sink_lease import SinkLeases
from pipelines.runtime.sink_status_reporter import ProgressReporter
from pipelines.sink_kinds import kind_of
from pipelines.sink_lifecycle import SinkRunner
from pipelines.sink_parts import SinkParts
from pipelines.spark_on_demand import SparkOnDemand

POLL: Final = 0.5
"""Seconds between two steps of a sink's runner, and between two checks whether a sink has failed.

Each step sends three queries to the catalog.
"""
IDLE_POLL: Final = 1.0
"""POLL for a sink that is idle: the queries of its steps take a third of the CPU of an idle apply process."""
STEP: Final = 0.1
"""Seconds between two attempts to apply a small range of the log, if the log is in an object store."""
LOCAL_STEP: Final = 0.02
"""Seconds between two attempts to apply a small range of the log, if the log is in a local directory.

An attempt without new transactions takes 0.1 ms there.
"""
IDLE_STEP: Final = 0.05
"""STEP for a sink that is idle, if that is longer: waking up costs CPU as well."""
IDLE_AFTER: Final = 2.0
"""Seconds without a new range after which a sink is idle."""
LOG_POLL: Final = 0.1
"""Seconds between two checks whether the change log exists; the first rows of a new pipeline wait for it."""
COMPACTION_EXIT: Final = 5.0
"""Maximum seconds that the ending process waits for a running compaction; killing a compaction does no harm."""

log = structlog.get_logger("apply")

Check = Callable[[LogReader, Callable[[], SparkSession]], None]
"""Function that compares the definition with the log.

Its second argument is a function that waits for the Spark session and returns it.
"""


@dataclass(frozen=True, slots=True)
class StopCondition:
    """When the apply process ends, and the check that runs before it opens a sink."""

    stop: Event
    """Set by SIGTERM or SIGINT."""
    once: bool = False
    """Whether the process also ends when every sink has applied the log up to the durable position at the start."""
    check: Check | None = None
    """Called before any sink is opened; the process ends with the error that it raises."""


def main(definition: Definition, *, once: bool = False, check: Check | None = None) -> int:
    """Apply the log to the sinks until SIGTERM or SIGINT; then finish the running batches and return 0.

    With `once`, also return when all sinks have applied the log up to the durable position at the start; raise the
    error of a sink that gives up before that. Also raises the errors of `check`, and SparkUnavailable if Spark does
    not start, or if it is known before that it could not.
    """
    stop = Event()

    def drain(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    # separate from `stop`, which a signal sets: the last report includes errors after the signal
    ended = Event()
    with Catalog.open(definition.catalog.url) as catalog:
        reporter = ProgressReporter(catalog, definition.name, metrics.Metrics(), ended)
        reporter.start()
        try:
            _run(definition, catalog, reporter, StopCondition(stop, once, check))
        except BaseException as exc:
            reporter.state, reporter.error = "failed", as_cdc_error(exc, "apply")
            raise
        finally:
            stop.set()
            ended.set()
            reporter.join()
    return 0


def _run(definition: Definition, catalog: Catalog, reporter: ProgressReporter, end: StopCondition) -> None:
    cuts, pauses = CutRequests(catalog, definition.name), ReplayPauses(catalog, definition.name)
    leases = SinkLeases(catalog, definition.name)
    kernels = Thread(target=_load_kernels, args=(definition,), name="kernels")
    kernels.start()
    with ThreadPoolExecutor(1, thread_name_prefix="spark") as thread:
        spark, ended = SparkOnDemand.of(definition, thread), Event()
        session = partial(spark.session, "a compaction of the log is large")
        compaction = CompactionWorker(definition, catalog, reporter.figures, session, ended)
        compaction.sinks_catch_up = lambda: any(sink.is_catching_up for sink in reporter.sinks)
        try:
            if _wait_for_log(definition, end):
                if end.check is not None:
                    end.check(LogReader(definition.log.root), partial(spark.session, "a rule has expressions"))
                if not end.once:
                    compaction.start()
                parts = SinkParts(cuts, pauses, reporter.figures, spark, leases, catalog)
                with _with_views(definition, reporter, parts) as shared:
                    _run_sinks(definition, reporter, shared, end)
        finally:
            ended.set()
            leases.close()
            spark.stop()
            if compaction.is_alive():
                compaction.join(COMPACTION_EXIT)
            kernels.join()


def _load_kernels(definition: Definition) -> None:
    for sink in {sink.kind: sink for sink in definition.sinks}.values():
        kind_of(sink).load_kernels()


@contextmanager
def _with_views(definition: Definition, reporter: ProgressReporter, parts: SinkParts) -> Iterator[SinkParts]:
    """Compute the views during the block, if the definition has any; yield the parts with what takes their cuts."""
    if not definition.views:
        yield parts
        return
    worker = import_module("pipelines.views.view_worker")  # imported late: few pipelines have views
    session = partial(parts.spark.session, "the definition has views")
    with worker.computed_views(definition, session, reporter, parts.catalog) as input_cuts:
        yield replace(parts, input_cuts=input_cuts)


def _run_sinks(definition: Definition, reporter: ProgressReporter, parts: SinkParts, end: StopCondition) -> None:
    """Run each sink in its own thread, until the stop condition is met, Spark fails to start, or a thread fails."""
    sinks = [sink.unthrottled if end.once else sink for sink in definition.sinks]
    runners = [SinkRunner(definition, sink, parts) for sink in sinks]
    reporter.sinks += [runner.progress for runner in runners]
    reporter.standby = lambda: bool(runners) and all(runner.is_standby for runner in runners)
    reporter.state = "running"
    goal = LogReader(definition.log.root).durable if end.once else None
    ended = Event()
    with ThreadPoolExecutor(max(1, len(runners)), thread_name_prefix="sink") as pool:
        pause = STEP if is_remote(definition.log.path) else LOCAL_STEP
        check_every = POLL if goal is None else STEP  # with a goal, a command may wait for the end
        threads = [pool.submit(_run_sink, runner, ended, pause) for runner in runners]
        try:
            while (
                not end.stop.wait(check_every)
                and parts.spark.error is None
                and not any(thread.done() for thread in threads)
            ):
                started = parts.spark.available is not None
                reporter.figures.set(metrics.SPARK_STARTED, float(started), definition.name)
                if goal is not None and all(runner.has_applied(goal) for runner in runners):
                    break
        finally:
            ended.set()
    for thread in threads:
        thread.result()
    for runner in runners:
        runner.stop()
    if parts.spark.error is not None and not end.stop.is_set():
        raise parts.spark.error
    if goal is not None and (errors := [runner.final_error for runner in runners if runner.final_error is not None]):
        raise errors[0]


def _run_sink(runner: SinkRunner, ended: Event, pause: float) -> None:
    """Run one sink in the calling thread until `ended` is set.

    Each sink has its own thread, so that no sink waits for the merges or Spark jobs of another sink.
    pause: seconds between two attempts to apply a small range.
    """
    applied_at = time.monotonic()
    while not ended.is_set():
        runner.step()
        stepped_at = time.monotonic()
        while not ended.is_set():
            now = time.monotonic()
            is_idle = now - applied_at >= IDLE_AFTER
            if now - stepped_at >= (IDLE_POLL if is_idle else POLL):
                break
            if runner.apply_small_range():
                applied_at = now
            else:
                ended.wait(runner.pause(max(pause, IDLE_STEP) if is_idle else pause))


def _wait_for_log(definition: Definition, end: StopCondition) -> bool:
    while not end.stop.is_set():
        try:
            if LogReader(definition.log.root).durable is not None:
                return True
            if end.once:
                return False
        except (LogCorrupt, LogFormatUnknown, LogInaccessible):
            raise
        except LogError:
            if end.once:
                raise
            log.debug("waiting until the change log exists", path=definition.log.path)
        end.stop.wait(LOG_POLL)
    return False
