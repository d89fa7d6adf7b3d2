"""The apply process: one Spark session, one streaming query per sink, and what happens when a query stops.

Two of them may fill different sinks of one pipeline; of two that fill the same the second waits (`running/holds.py`).
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from types import FrameType
from typing import Final

import structlog
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from cdc import metrics
from cdc.catalog import Catalog
from cdc.config import Definition, DeltaSinkDefinition, SearchSinkDefinition, table_settings
from cdc.config.sinks import HistoryMode, settings_with_rule
from cdc.errors import (
    CdcError,
    LogCorrupt,
    LogError,
    LogFormatUnknown,
    LogInaccessible,
    LogTrimmed,
    Reaction,
    SinkError,
    SinkInUse,
    as_cdc_error,
)
from cdc.failpoint import hit
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.private_files import make_private_directory
from pipelines.apply import SinkLoop
from pipelines.compaction.compaction_worker import CompactionWorker
from pipelines.dead_letters.requests import DeadLetterCommands
from pipelines.fold_range import RangeFolder
from pipelines.runtime.consumer_registration import ConsumerRegistration, pinned_in
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.progress import ProgressReporter, SinkFigures
from pipelines.runtime.replay_pause import ReplayPauses
from pipelines.runtime.session import SparkSettings, spark_session
from pipelines.runtime.sink_lease import LEASE, SinkLeases
from pipelines.runtime.throttle import ThrottleState
from pipelines.runtime.worker_errors import unread_by_worker
from pipelines.sinks.contract import Sink, SparkAwaited
from pipelines.sinks.delta.maintenance import UpkeepSettings
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink as DeltaTarget
from pipelines.sinks.search.sink import SearchSink as SearchTarget
from pipelines.sinks.table_state import failure_reason, log_trimmed_error
from pipelines.source.data_source import register
from pipelines.source.options import tables_option

MAX_ROWS: Final = 200_000
"""Rows per micro-batch: about half a second of folding on two cores."""
POLL: Final = 0.5
"""Seconds between two looks at a query, each of which asks the catalog three things."""
STEP: Final = 0.1
"""Seconds between two looks at the log while Spark has not come."""
LEAVES_WITHIN: Final = 5.0
"""Seconds for a compaction to notice that its session is gone; killed in the middle it does no harm."""
ATTEMPTS: Final = 5
"""How often a sink may fail in a row before a run that is to end gives it up."""

log = structlog.get_logger("apply")

Check = Callable[[LogReader, Callable[[], SparkSession]], None]
"""What holds the definition against the log once there is one; the session is there when it is asked for."""


@dataclass(frozen=True, slots=True)
class StopCondition:
    """When the process ends."""

    asked: Event
    """Set by a signal."""
    once: bool = False
    """Also as soon as every sink has all that was durable when the process began."""
    check: Check | None = None
    """Ends it as well, by what it raises, before any sink is opened."""


def main(definition: Definition, *, once: bool = False, check: Check | None = None) -> int:
    """Run until SIGTERM or SIGINT; a batch that has begun is finished first.

    once: until every sink has all that is durable now. Raises what kept a sink from it for good, and what check raises.
    """
    stop = Event()

    def drain(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    # not `stop`, which a signal sets: what fails after that is to be in the last report as well
    ended = Event()
    with Catalog.open(definition.catalog.url) as catalog:
        board = ProgressReporter(catalog, definition.name, metrics.Metrics(), ended)
        board.start()
        try:
            _run(definition, catalog, board, StopCondition(stop, once, check))
        except BaseException as exc:
            board.state, board.error = "failed", as_cdc_error(exc, "apply")
            raise
        finally:
            stop.set()
            ended.set()
            board.join()
    return 0


def _run(definition: Definition, catalog: Catalog, board: ProgressReporter, ending: StopCondition) -> None:
    settings = SparkSettings.of(definition, f"cdc-{definition.name}")
    cuts, pauses = CutRequests(catalog, definition.name), ReplayPauses(catalog, definition.name)
    holds = SinkLeases(catalog, definition.name)
    with ThreadPoolExecutor(1, thread_name_prefix="spark") as starter:
        starting, ended = starter.submit(_session, settings), Event()
        upkeep = CompactionWorker(definition, catalog, board.figures, starting.result, ended)
        try:
            if _wait_for_log(definition, ending):
                if ending.check is not None:
                    ending.check(LogReader(definition.log.root), starting.result)
                if not ending.once:
                    upkeep.start()
                _look_after(definition, board, SinkParts(cuts, pauses, board.figures, starting, holds, catalog), ending)
        finally:
            ended.set()
            holds.close()
            _stop(starting)
            if upkeep.is_alive():
                upkeep.join(LEAVES_WITHIN)


def _stop(starting: Future[SparkSession]) -> None:
    """End Spark if it is there; a signal to the whole process group may have ended its JVM before."""
    if starting.exception() is None:
        with suppress(Py4JError, OSError):
            starting.result().stop()


def _session(settings: SparkSettings) -> SparkSession:
    session = spark_session(settings)
    register(session)
    return session


def _look_after(definition: Definition, board: ProgressReporter, parts: SinkParts, ending: StopCondition) -> None:
    sinks = [unpaced(wanted) if ending.once else wanted for wanted in definition.sinks]
    queries = [SinkRunner(definition, wanted, parts) for wanted in sinks]
    board.sinks += [query.progress for query in queries]
    board.standby = lambda: bool(queries) and all(query.waiting for query in queries)
    board.state = "running"
    goal = LogReader(definition.log.root).durable if ending.once else None
    ended = Event()
    with ThreadPoolExecutor(max(1, len(queries)), thread_name_prefix="sink") as pool:
        tended = [pool.submit(_tend, query, ended) for query in queries]
        try:
            while not ending.asked.wait(STEP) and not parts.without_spark and not any(one.done() for one in tended):
                if goal is not None and all(query.has(goal) for query in queries):
                    break
        finally:
            ended.set()
    for one in tended:
        one.result()
    for query in queries:
        query.stop()
    if parts.without_spark and not ending.asked.is_set():
        parts.starting.result()  # raises why
    if goal is not None and (failed := [query.given_up for query in queries if query.given_up is not None]):
        raise failed[0]


def _tend(query: SinkRunner, ended: Event) -> None:
    """Look after one sink, in a thread of its own: none waits for another's merges, or for its Spark."""
    while not ended.is_set():
        query.look()
        until = time.monotonic() + POLL
        while time.monotonic() < until and not ended.is_set():
            if not query.advance():
                ended.wait(STEP)


def _wait_for_log(definition: Definition, ending: StopCondition) -> bool:
    while not ending.asked.is_set():
        try:
            if LogReader(definition.log.root).durable is not None:
                return True
            if ending.once:
                return False
        except (LogCorrupt, LogFormatUnknown, LogInaccessible):
            raise
        except LogError:
            if ending.once:
                raise
            log.debug("no log yet", path=definition.log.path)
        ending.asked.wait(POLL)
    return False


class FirstBatchGate:
    """Whose first batch is on its way: two side by side in a cold session take three times as long."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._whose: object = None

    def begins(self, whose: object) -> bool:
        """Whether its query may be started, or was."""
        with self._lock:
            self._whose = self._whose or whose
            return self._whose is whose

    def ends(self, whose: object) -> None:
        """Its first batch came, or never will."""
        with self._lock:
            if self._whose is whose:
                self._whose = None


@dataclass(frozen=True, slots=True)
class SinkParts:
    """What the queries share."""

    cuts: CutRequests
    pauses: ReplayPauses
    figures: metrics.Metrics
    starting: Future[SparkSession]
    """The session; a JVM takes seconds to come up."""
    holds: SinkLeases | None = None
    """None: there is nobody who could hold a sink as well."""
    catalog: Catalog | None = None
    """Where people speak about parked keys, and rows are asked for; None: nobody does."""
    warming: FirstBatchGate = field(default_factory=FirstBatchGate)
    batch_rows: int = MAX_ROWS
    """Rows of a batch at most, about."""

    @property
    def without_spark(self) -> bool:
        """Whether Spark did not start, which ends the process."""
        return self.starting.done() and self.starting.exception() is not None


class SinkRunner:
    """One sink's streaming query; started again from the sink's own record when it stops.

    A sink does not wait for Spark: until the first batch of its query comes, the loop itself advances over what is
    small enough to be folded and merged without.
    """

    def __init__(
        self, definition: Definition, wanted: DeltaSinkDefinition | SearchSinkDefinition, parts: SinkParts
    ) -> None:
        self._definition, self._wanted, self._parts = definition, wanted, parts
        self.progress = SinkFigures(definition.name, wanted.name, parts.figures)
        self._orders = None if parts.catalog is None else DeadLetterCommands(definition, parts.catalog, self.progress)
        self._query: StreamingQuery | None = None
        self._loop: SinkLoop | None = None
        self._sink: Sink | None = None
        self._registered: ConsumerRegistration | None = None
        self._resting: ThrottleState | None = None
        self._view: LogReader | None = None
        self._checkpoint: Path | None = None
        self._failure: Exception | None = None
        self._arrived = False
        self._awaits_spark = False
        self._attempts = 0
        self._due = 0.0
        self._halted = False
        self._error: CdcError | None = None
        self._waits_since: float | None = None

    @property
    def waiting(self) -> bool:
        """Whether another apply process holds the sink."""
        return self._waits_since is not None

    @property
    def given_up(self) -> CdcError | None:
        """What keeps the sink from going on, unless it may go by itself."""
        if self._waits_since is not None and time.monotonic() - self._waits_since > LEASE:
            return SinkInUse(
                f"another apply process holds sink {self._wanted.name!r}: {self._holder}",
                remedy="nothing to do if that one is to go on; otherwise stop it and start this one again",
            )
        return self._error if self._halted or self._attempts >= ATTEMPTS else None

    def has(self, goal: Position) -> bool:
        """Whether the sink has all of the log up to goal, but for tables that stopped; or never will."""
        if self.given_up is not None:
            return True
        loop = self._loop
        return loop is not None and loop.position >= goal and (self._query is not None or not loop.lagging)

    def look(self) -> None:
        """Open the sink and start the query when they are due, see whether it failed, let go of unneeded cuts.

        A sink that is being replayed is closed; afterwards it starts from its new record, also if it had halted.
        So is one that another process holds.
        """
        if not self._may_be_open():
            return
        if self._halted or self._parts.without_spark or time.monotonic() < self._due:
            return
        if self._query is not None and not self._query.isActive:
            self._try(self._raise_failure)
            return
        if self._loop is not None and self._loop.mended:
            self.stop()
            return
        if self._loop is None and self._can_open:
            self._try(self._open)
        may_start = self._loop is not None and self._query is None and self._parts.starting.done()
        if may_start and self._parts.warming.begins(self):
            self._try(self._start)
        self.advance()
        if self._sink is not None:
            self._attempts = 0 if self._query is not None and self._query.lastProgress else self._attempts
            for handle in self._parts.cuts.released(self._wanted.name):
                self._sink.release(handle)
        self._hear()
        self._register()

    def advance(self) -> bool:
        """Apply what the log holds, if small, until the first batch of the query comes; whether there was anything."""
        loop = self._loop
        if loop is None or self._arrived or self._awaits_spark or (self._resting and self._resting.rests):
            return False
        before = loop.position
        self._try(self._advance)
        self.progress.awaits_spark = self._awaits_spark
        return self._loop is loop and loop.position > before

    def stop(self) -> None:
        """Stop between two batches and close the sink."""
        if self._resting is not None:
            self._resting.end()
        if self._loop is not None:
            self._loop.drain()
        if self._query is not None:
            self._query.stop()
        self._register(at_once=True)
        if self._sink is not None:
            self._sink.close()
        if self._checkpoint is not None:
            shutil.rmtree(self._checkpoint, ignore_errors=True)
        self._query = self._loop = self._sink = self._checkpoint = self._resting = None
        self._parts.warming.ends(self)

    def _may_be_open(self) -> bool:
        """Whether the sink is this process' own, and no replay is at it; if not, it is closed."""
        holds = self._parts.holds
        if holds is not None and not holds.take(self._wanted.name):
            if self._waits_since is None:
                self.stop()
                self._waits_since = time.monotonic()
            return False
        self._waits_since = None
        if self._parts.pauses.held(self._wanted.name):
            self._pause()
            return False
        return True

    @property
    def _holder(self) -> str:
        return "" if self._parts.holds is None else self._parts.holds.other(self._wanted.name)

    def _pause(self) -> None:
        self.stop()
        self._halted, self._attempts, self._due = False, 0, 0.0
        with suppress(CdcError):
            self._parts.pauses.grant(self._wanted.name)

    @property
    def _can_open(self) -> bool:
        by_spark = isinstance(self._wanted, DeltaSinkDefinition) and Writer(self._wanted.writer.value) is Writer.SPARK
        return not by_spark or self._parts.starting.done()

    def _open(self) -> None:
        self._sink = build_sink(self._wanted)
        if self._parts.starting.done():
            self._sink.attach(self._parts.starting.result())
        change_log = LogReader(self._definition.log.root)
        fold = RangeFolder(change_log, self._wanted.name, self._wanted.tables, keeps_history(self._wanted))
        loop = SinkLoop(self._sink, fold, self._parts.cuts, self.progress)
        loop.open()
        self._registered = ConsumerRegistration(self._definition.log.root, change_log.log_id, self._wanted)
        self._loop, self._view, self._failure = loop, change_log, None
        self._arrived = self._awaits_spark = self.progress.awaits_spark = False
        if isinstance(self._sink, DeltaTarget):
            self.progress.pace, self.progress.foreign = self._sink.pace, self._sink.foreign
        self._resting = None if self.progress.pace is None else ThrottleState(self.progress.pace, self._is_wanted)
        self._register(at_once=True)

    def _register(self, *, at_once: bool = False) -> None:
        if self._loop is not None and self._registered is not None and self._view is not None:
            held = self._loop.held
            self._registered.say(held, pinned_in(self._view, held), at_once=at_once)

    def _is_wanted(self) -> bool:
        """Whether the next batch is not to wait for its time: somebody waits for it, or it is as large as they get."""
        loop, view = self._loop, self._view
        if loop is None or view is None or loop.parking.due or self._parts.cuts.asked(self._wanted.name):
            return True
        try:
            view.refresh()
            return view.latest_boundary(loop.position, self._parts.batch_rows) < view.latest_boundary(loop.position)
        except LogError:
            return True  # the batch tells what is wrong

    def _hear(self) -> None:
        if self._loop is not None and self._orders is not None:
            self._orders.look(self._loop.parking)

    def _advance(self) -> None:
        try:
            self._loop.advance()  # type: ignore[union-attr]
        except SparkAwaited:
            self._awaits_spark = True

    def _start(self) -> None:
        session, loop = self._parts.starting.result(), self._loop
        assert loop is not None and self._sink is not None  # noqa: S101, PT018 - open came first
        self._sink.attach(session)
        for table in loop.lagging:
            loop.catch_up(table, session)
        base = Path(self._definition.spark.checkpoint.removeprefix("file://"))
        make_private_directory(base)
        self._checkpoint = Path(tempfile.mkdtemp(prefix=f"{self._wanted.name}-", dir=base))
        rows = (
            session.readStream.format("cdc")
            .option("path", self._definition.log.path)
            .option("storage", self._definition.log.storage.to_json())
            .option("tables", tables_option(self._wanted.tables))
            .option("boundaries", "true")  # a batch also when only the position moved
            .option("maxRowsPerTrigger", str(self._parts.batch_rows))
            .option("startingPosition", str(loop.position))
            .load()
        )
        self._query = (
            rows.writeStream.foreachBatch(self._guarded)
            # of this machine, whatever the cluster's default store; as it stands: Hadoop takes %20 for a part of it
            .option("checkpointLocation", f"file://{self._checkpoint}")
            .queryName(f"{self._definition.name}-{self._wanted.name}")
            .trigger(processingTime=f"{int(self._definition.spark.trigger * 1000)} milliseconds")
            .start()
        )

    def _guarded(self, rows, batch_id):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - Spark inspects it
        self._arrived, resting = True, self._resting
        self.progress.awaits_spark = False
        self._parts.warming.ends(self)
        hit("after_offsets")
        try:
            end = _end_of_batch(self._checkpoint, batch_id)  # type: ignore[arg-type]
            self._loop(rows, end)  # type: ignore[misc]
            hit("before_commits")
            if resting is not None:
                resting.rest()  # here, so that the next batch is planned when it may begin, up to what is there then
        except Exception as exc:
            self._failure = exc  # Spark hands on only its text
            raise

    def _raise_failure(self) -> None:
        raised = self._query.exception() if self._query else None
        raise self._failure or raised or SinkError("the streaming query ended without a word")

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as exc:
            error, self._halted = self._fate(exc)
            self._error = error
            self.stop()
            self._attempts += 1
            self._due = time.monotonic() + min(30.0, 0.5 * 2 ** min(self._attempts, 6))
            self.progress.failed(error)
            log.exception(
                "sink stopped",
                sink=self._wanted.name,
                reason=failure_reason(error),
                halted=self._halted,
                exc_info=not isinstance(exc, CdcError),
            )

    def _fate(self, exc: Exception) -> tuple[CdcError, bool]:
        """(what is told of a failure, whether it would come again)."""
        if isinstance(exc, LogTrimmed):
            return log_trimmed_error(exc, self._wanted.name), self._is_too_late()
        if isinstance(exc, CdcError):
            return exc, exc.reaction is Reaction.HALT
        if (unread := unread_by_worker(exc)) is not None:
            return unread, True
        return SinkError(f"{type(exc).__name__}: {str(exc)[:300]}"), False

    def _is_too_late(self) -> bool:
        """Whether the log does not lead on from where the sink stands; a batch may also end where none can any more."""
        if self._loop is None:
            return False
        try:
            LogReader(self._definition.log.root).latest_boundary(self._loop.position)
        except LogTrimmed:
            return True
        except LogError:
            return False
        return False


def _end_of_batch(checkpoint: Path, batch: int) -> Position:
    """The last position of a batch, from the offset log that Spark wrote before it ran it (one line per source)."""
    return Position(json.loads((checkpoint / "offsets" / str(batch)).read_text().splitlines()[2])["position"])


def build_sink(wanted: DeltaSinkDefinition | SearchSinkDefinition) -> Sink:
    """The sink that a definition asks for."""
    if isinstance(wanted, DeltaSinkDefinition):
        return DeltaTarget(delta_settings(wanted))
    return SearchTarget(wanted.name, wanted.path, wanted.fields, wanted.dead_letters)


def unpaced(wanted: DeltaSinkDefinition | SearchSinkDefinition) -> DeltaSinkDefinition | SearchSinkDefinition:
    """The sink with batches that wait for nothing."""
    return wanted.model_copy(update={"max_rewrite": 0}) if isinstance(wanted, DeltaSinkDefinition) else wanted


def keeps_history(wanted: DeltaSinkDefinition | SearchSinkDefinition) -> Callable[[str], bool] | None:
    """Of which tables, by topic, a sink wants every change; None: of none."""
    if not isinstance(wanted, DeltaSinkDefinition):
        return None
    latest = (settings_with_rule(wanted, rule).history_mode is HistoryMode.LATEST for rule in (None, *wanted.rules))
    if all(latest):
        return None
    return lambda topic: table_settings(topic, wanted, wanted.rules).history_mode is not HistoryMode.LATEST


def delta_settings(wanted: DeltaSinkDefinition) -> DeltaSettings:
    """What a definition says of a Delta sink, in the sink's own words."""
    return DeltaSettings(
        name=wanted.name,
        path=wanted.path,
        writer=Writer(wanted.writer.value),
        table=wanted,
        rules=wanted.rules,
        upkeep=UpkeepSettings(
            wanted.upkeep.every, wanted.upkeep.vacuum_after, wanted.cuts.retain, wanted.upkeep.keep_commits
        ),
        max_rewrite=wanted.max_rewrite,
    )
