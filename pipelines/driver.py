"""The apply process: one Spark session, one streaming query per sink, and what happens when a query stops."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Final

import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from cdc import metrics
from cdc.catalog import Catalog
from cdc.config import Definition, DeltaSink, SearchSink
from cdc.errors import CdcError, LogError, Reaction, SinkError
from cdc.log.read import LogReader
from cdc.position import Position
from cdc.stores.published import TableRecord
from cdc.table import exactly
from pipelines.apply import SinkLoop
from pipelines.cuts import Cuts
from pipelines.folding import RangeFold
from pipelines.pauses import Pauses
from pipelines.progress import Board, Progress
from pipelines.session import SparkSettings, spark_session
from pipelines.sinks.delta import DeltaSettings, Writer
from pipelines.sinks.delta import DeltaSink as DeltaTarget
from pipelines.sinks.search import SearchSink as SearchTarget
from pipelines.sinks.sink import Sink, SparkAwaited
from pipelines.source import register, rows_between, tables_option
from pipelines.types import TypePolicy

MAX_ROWS: Final = 200_000
"""Rows per micro-batch: about half a second of folding on two cores."""
POLL: Final = 0.2
"""Seconds between two looks at the queries."""

log = structlog.get_logger("apply")


def main(definition: Definition) -> int:
    """Run until SIGTERM or SIGINT; a batch that has begun is finished first."""
    stop = Event()

    def drain(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    figures = metrics.Figures()
    with Catalog.open(definition.catalog.url) as catalog:
        board = Board(catalog, definition.name, figures, stop)
        board.start()
        try:
            _run(definition, catalog, board, figures, stop)
        except CdcError as exc:
            board.state, board.error = "failed", exc
            raise
        finally:
            stop.set()
            board.join()
    return 0


def _run(definition: Definition, catalog: Catalog, board: Board, figures: metrics.Figures, stop: Event) -> None:
    settings = SparkSettings.of(definition, f"cdc-{definition.name}")
    cuts, pauses = Cuts(catalog, definition.name), Pauses(catalog, definition.name)
    with ThreadPoolExecutor(1, thread_name_prefix="spark") as starter:
        starting = starter.submit(_session, settings)
        try:
            if _wait_for_log(definition, stop):
                _look_after(definition, board, SinkParts(cuts, pauses, figures, starting), stop)
        finally:
            starting.result().stop()


def _session(settings: SparkSettings) -> SparkSession:
    session = spark_session(settings)
    register(session)
    return session


def _look_after(definition: Definition, board: Board, parts: SinkParts, stop: Event) -> None:
    queries = [SinkQuery(definition, wanted, parts) for wanted in definition.sinks]
    board.sinks += [query.progress for query in queries]
    board.state = "running"
    while not stop.wait(POLL):
        cold = False
        for query in queries:
            # one after the other while the session is cold: two first batches side by side take three times as long
            query.look(may_start=not cold)
            cold = cold or query.starting
    for query in queries:
        query.stop()


def _wait_for_log(definition: Definition, stop: Event) -> bool:
    while not stop.is_set():
        try:
            if LogReader(definition.log.path).durable is not None:
                return True
        except LogError:
            log.debug("no log yet", path=definition.log.path)
        stop.wait(POLL)
    return False


@dataclass(frozen=True, slots=True)
class SinkParts:
    """What the queries share."""

    cuts: Cuts
    pauses: Pauses
    figures: metrics.Figures
    starting: Future[SparkSession]
    """The session; a JVM takes seconds to come up."""


class SinkQuery:
    """One sink's streaming query; started again from the sink's own record when it stops.

    A sink does not wait for Spark: until the first batch of its query comes, the loop itself advances over what is
    small enough to be folded and merged without.
    """

    def __init__(self, definition: Definition, wanted: DeltaSink | SearchSink, parts: SinkParts) -> None:
        self._definition, self._wanted, self._parts = definition, wanted, parts
        self.progress = Progress(definition.name, wanted.name, parts.figures)
        self._query: StreamingQuery | None = None
        self._loop: SinkLoop | None = None
        self._sink: Sink | None = None
        self._checkpoint: Path | None = None
        self._failure: Exception | None = None
        self._arrived = False
        self._attempts = 0
        self._due = 0.0
        self._halted = False

    @property
    def starting(self) -> bool:
        """Whether the first batch of a running query is still on its way."""
        return self._query is not None and not self._arrived

    def look(self, *, may_start: bool) -> None:
        """Open the sink and start the query when they are due, see whether it failed, let go of unneeded cuts.

        A sink that is being replayed is closed; afterwards it starts from its new record, also if it had halted.
        """
        if self._parts.pauses.held(self._wanted.name):
            self._pause()
            return
        if self._halted or time.monotonic() < self._due:
            return
        if self._query is not None and not self._query.isActive:
            self._try(self._raise_failure)
            return
        if self._loop is not None and self._loop.mended:
            self.stop()
            return
        if self._loop is None and self._can_open:
            self._try(self._open)
        if self._loop is not None and self._query is None and may_start and self._parts.starting.done():
            self._try(self._start)
        if self._loop is not None and not self._arrived:
            self._try(self._advance)
        if self._sink is not None:
            self._attempts = 0 if self._query is not None and self._query.lastProgress else self._attempts
            for handle in self._parts.cuts.released(self._wanted.name):
                self._sink.release(handle)

    def stop(self) -> None:
        """Stop between two batches and close the sink."""
        if self._loop is not None:
            self._loop.drain()
        if self._query is not None:
            self._query.stop()
        if self._sink is not None:
            self._sink.close()
        if self._checkpoint is not None:
            shutil.rmtree(self._checkpoint, ignore_errors=True)
        self._query = self._loop = self._sink = self._checkpoint = None

    def _pause(self) -> None:
        self.stop()
        self._halted, self._attempts, self._due = False, 0, 0.0
        with suppress(CdcError):
            self._parts.pauses.grant(self._wanted.name)

    @property
    def _can_open(self) -> bool:
        by_spark = isinstance(self._wanted, DeltaSink) and Writer(self._wanted.writer.value) is Writer.SPARK
        return not by_spark or self._parts.starting.done()

    def _open(self) -> None:
        self._sink = build_sink(self._wanted)
        if self._parts.starting.done():
            self._sink.attach(self._parts.starting.result())
        fold = RangeFold(LogReader(self._definition.log.path), self._wanted.name, self._wanted.tables)
        loop = SinkLoop(self._sink, fold, self._parts.cuts, self.progress)
        loop.open()
        self._loop, self._failure, self._arrived = loop, None, False

    def _advance(self) -> None:
        with suppress(SparkAwaited):
            self._loop.advance()  # type: ignore[union-attr]

    def _start(self) -> None:
        session, loop = self._parts.starting.result(), self._loop
        assert loop is not None and self._sink is not None  # noqa: S101, PT018 - open came first
        self._sink.attach(session)
        for table in loop.lagging:
            loop.catch_up(table, self._range(session, table, loop.position))
        base = Path(self._definition.spark.checkpoint)
        base.mkdir(parents=True, exist_ok=True)
        self._checkpoint = Path(tempfile.mkdtemp(prefix=f"{self._wanted.name}-", dir=base))
        rows = (
            session.readStream.format("cdc")
            .option("path", self._definition.log.path)
            .option("tables", tables_option(self._wanted.tables))
            .option("boundaries", "true")  # a batch also when only the position moved
            .option("maxRowsPerTrigger", str(MAX_ROWS))
            .option("startingPosition", str(loop.position))
            .load()
        )
        self._query = (
            rows.writeStream.foreachBatch(self._guarded)
            .option("checkpointLocation", str(self._checkpoint))
            .queryName(f"{self._definition.name}-{self._wanted.name}")
            .trigger(processingTime=f"{int(self._definition.spark.trigger * 1000)} milliseconds")
            .start()
        )

    def _guarded(self, rows, batch_id):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - Spark inspects it
        self._arrived = True
        try:
            end = _end_of_batch(self._checkpoint, batch_id)  # type: ignore[arg-type]
            self._loop(rows, end)  # type: ignore[misc]
        except Exception as exc:
            self._failure = exc  # Spark hands on only its text
            raise

    def _range(self, session: SparkSession, table: TableRecord, upto: Position) -> DataFrame:
        globs = (exactly(table.topic),)
        return rows_between(session, self._definition.log.path, globs, Position(table.position), upto)

    def _raise_failure(self) -> None:
        raised = self._query.exception() if self._query else None
        raise self._failure or raised or SinkError("the streaming query ended without a word")

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as exc:
            self.stop()
            error = exc if isinstance(exc, CdcError) else SinkError(f"{type(exc).__name__}: {str(exc)[:300]}")
            self._halted = isinstance(exc, CdcError) and exc.reaction is Reaction.HALT
            self._attempts += 1
            self._due = time.monotonic() + min(30.0, 0.5 * 2 ** min(self._attempts, 6))
            self.progress.failed(error)
            log.exception("sink stopped", sink=self._wanted.name, code=error.code, halted=self._halted)


def _end_of_batch(checkpoint: Path, batch: int) -> Position:
    """The last position of a batch, from the offset log that Spark wrote before it ran it (one line per source)."""
    return Position(json.loads((checkpoint / "offsets" / str(batch)).read_text().splitlines()[2])["position"])


def build_sink(wanted: DeltaSink | SearchSink) -> Sink:
    """The sink that a definition asks for."""
    if isinstance(wanted, DeltaSink):
        return DeltaTarget(delta_settings(wanted))
    return SearchTarget(wanted.name, wanted.path, wanted.fields)


def delta_settings(wanted: DeltaSink) -> DeltaSettings:
    """What a definition says of a Delta sink, in the sink's own words."""
    return DeltaSettings(
        name=wanted.name, path=wanted.path, writer=Writer(wanted.writer.value), types=TypePolicy(wanted.types.value)
    )
