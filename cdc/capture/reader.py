"""The reader: the capture loop from the replication stream into the change log.

Four stages run in one thread each: receive, decode, encode, append. The queues between them are limited in bytes. A
full queue stops the reading of the socket; status updates continue. The reader confirms only durable positions.
The commit batcher alone decides when to commit or trim the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, Final

from cdc import metrics
from cdc.byte_queue import ByteQueue, QueueClosed
from cdc.capture.commit_batcher import CommitBatch, CommitBatcher, DurablePosition, LogAppender
from cdc.capture.decode_stage import DecodeStage, LastTransaction, ResumePoint, StreamObservers
from cdc.capture.initial_snapshot import CopySummary, ensure_initial_snapshot
from cdc.capture.resume_checks import captured_oids, lineage_of, lsn_to_confirm
from cdc.capture.settings import ReaderSettings
from cdc.capture.slot_belongs_to_log import check_resume
from cdc.errors import SourceError
from cdc.failpoint import hit
from cdc.log.disk_format import LogIdentity
from cdc.log.encoded_chunk import PlacedChunk
from cdc.log.maintenance_worker import RetentionWorker
from cdc.log.reader import LogReader
from cdc.log.retrying_writer import RetryingWriter
from cdc.log.vacuum import remove_staged_files
from cdc.log.writer import LogWriter
from cdc.metrics import Metrics
from cdc.pgoutput.decoder_events import DecodedRows
from cdc.pgoutput.load_kernels import load_kernels
from cdc.pgoutput.message_parser import FrameBatch
from cdc.position import Position
from cdc.postgres.commit_position_bound import WalBound
from cdc.postgres.replication import ReplicationStream, StreamOptions, identify_system
from cdc.postgres.source_state import read_source_state
from cdc.snapshot.chunk_sender import ReaderLink

FRAMES_WAITING: Final = 16 * 1024 * 1024
"""Limit of the queue between receive and decode, in bytes of raw frames."""
ROWS_WAITING: Final = 32 * 1024 * 1024
"""Limit of the queue between decode and encode, in bytes of Arrow rows."""


@dataclass(frozen=True, slots=True)
class ReaderStart:
    """Result of one start of the reader, once its checks have passed and the replication stream is open."""

    position: Position
    """Position after which the log continues."""
    copied: CopySummary | None
    """Summary of the initial snapshot that this start has taken; None if no snapshot was needed."""
    compile_seconds: float
    """Seconds spent loading the compiled decoder; the first start on a machine compiles it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderContext:
    """Objects that the reader shares with other threads of the process; they outlive replication sessions."""

    metrics: Metrics = field(default_factory=Metrics)
    stop: Event = field(default_factory=Event)
    durable: DurablePosition = field(default_factory=DurablePosition)
    observers: StreamObservers = field(default_factory=StreamObservers)

    @property
    def link(self) -> ReaderLink:
        """Interface of the reader for the threads that copy tables."""
        return ReaderLink(self.observers.windows, self.durable, self.stop)


class Reader:
    """Reader that captures one source database into one log, in one replication session.

    `run` returns after `context.stop` is set and the last commits are done. It raises the error if the session fails.
    """

    def __init__(
        self,
        settings: ReaderSettings,
        context: ReaderContext,
        on_start: Callable[[ReaderStart], None] = lambda _start: None,
    ) -> None:
        """on_start: called when the replication stream is open."""
        self._settings = settings
        self._context = context
        self._on_start = on_start

    def run(self) -> None:
        """Take an initial snapshot if needed, then stream until `context.stop` is set.

        A snapshot is needed if the log is empty or a new epoch is requested.
        """
        settings = self._settings
        source = self._settings.source
        context = self._context
        identity = identify_system(source.dsn)
        expected = LogIdentity(system_id=identity.system_id, database=identity.database)
        writer = LogWriter.open(settings.log, expected, settings.limits)
        copied = ensure_initial_snapshot(source, settings.log, writer, context.metrics)
        seconds = self._load_kernels()
        options = StreamOptions(slot=source.slot, publication=source.publication, start=lsn_to_confirm(0))
        # From here on this session owns the slot, so no other reader appends to the log.
        with ReplicationStream.open(source.dsn, options) as stream, WalBound(source.dsn) as bound:
            session = self._resume(stream, bound)
            self._on_start(ReaderStart(context.durable.position, copied, seconds))
            session.run()
        if session.failure is not None:
            raise session.failure

    def _load_kernels(self) -> float:
        """Load the compiled decoder; return the seconds spent."""
        began = time.monotonic()
        self._context.metrics.set(metrics.COMPILING, 1, self._settings.source.pipeline)
        load_kernels()
        self._context.metrics.set(metrics.COMPILING, 0, self._settings.source.pipeline)
        return time.monotonic() - began

    def _resume(self, stream: ReplicationStream, bound: WalBound) -> _Session:
        """Open the log for writing, check that this source can continue the log, and return the session."""
        settings = self._settings
        source = self._settings.source
        context = self._context

        def show_blocked(on: bool) -> None:  # noqa: FBT001 - signature of RetryingWriter
            context.metrics.set(metrics.LOG_BLOCKED, on, source.pipeline)

        show_blocked(False)  # the previous session may have ended while storage was full
        log, has_received_all = LogReader(settings.log), Event()
        remove_staged_files(settings.log)
        writer = RetryingWriter(settings.log, settings.limits, has_received_all, show_blocked)
        last = writer.last_commit
        assert last is not None, "the initial snapshot has committed"  # noqa: S101
        state = read_source_state(source.dsn, source.slot, source.publication, captured_oids(log.schemas()))
        check_resume(settings.log, log, last, state)
        bound.expect(stream.server_start, state.identity)
        context.durable.advance(last.last)
        context.metrics.set(metrics.LOG_POSITION, int(last.last), source.pipeline)
        context.metrics.set(metrics.SOURCE_TIMELINE, state.identity.timeline, source.pipeline)
        confirmed = None if state.slot is None else state.slot.confirmed_flush
        last_transaction = LastTransaction(settings.log, last.last, last.committed_at)
        resume = ResumePoint(last.last, log.schemas(), confirmed, last_transaction)
        appender = LogAppender(
            writer=writer,
            bound=bound,
            lineage=lineage_of(state),
            durable=context.durable,
            metrics=context.metrics,
            pipeline=source.pipeline,
            has_received_all=has_received_all,
        )
        decoding = DecodeStage.open(source, settings.log, resume, context.observers)
        return _Session(settings, context, stream, decoding, appender)


class _Session:
    """The four stages of one replication session."""

    def __init__(
        self,
        settings: ReaderSettings,
        context: ReaderContext,
        stream: ReplicationStream,
        decoding: DecodeStage,
        appender: LogAppender,
    ) -> None:
        self._pipeline = settings.source.pipeline
        self._metrics = context.metrics
        self._stop = context.stop
        self._windows = context.observers.windows
        self._durable = context.durable
        self._stream = stream
        self._decoding = decoding
        self._appender = appender
        self._frames: ByteQueue[FrameBatch] = ByteQueue(FRAMES_WAITING)
        self._rows: ByteQueue[DecodedRows | PlacedChunk] = ByteQueue(ROWS_WAITING)
        self._batches: ByteQueue[CommitBatch] = ByteQueue(3)  # each counts as 1: three wait while one is written
        self._batcher = CommitBatcher(settings.commit_bytes, settings.linger, context.durable, self._rows.wake)
        self._retention = RetentionWorker(settings.log, settings.retention, self._batcher.request_trim)
        self.failure: BaseException | None = None
        """The first error of a stage; None while no stage has failed."""

    def run(self) -> None:
        """Run the stages until `stop` is set or a stage fails."""
        rows, batches = self._rows, self._batches
        ends = ((self._decode, rows), (self._encode, rows, batches), (self._append, batches))
        stages = [Thread(target=self._guard, args=end, name=end[0].__name__) for end in ends]
        with self._retention, self._durable.waking(self._batcher.check_again):
            for stage in stages:
                stage.start()
            try:
                self._receive()
            except SourceError:
                self._stream.close()  # before the queues drain: a server that shuts down waits for this connection
                raise
            finally:
                self._appender.has_received_all.set()
                self._frames.close()
                for stage in stages:
                    stage.join()
                self._decoding.close()
            self._stream.confirm(lsn_to_confirm(self._durable.position.lsn))
            self._stream.tick()

    def _guard(self, stage: Callable[[], None], *queues: ByteQueue[Any]) -> None:
        """Run a stage; close its input and output queues when the stage ends."""
        try:
            stage()
        except QueueClosed:
            pass
        except BaseException as exc:  # noqa: BLE001 - the reader raises it
            self.failure = self.failure or exc
            self._frames.close(discard=True)
        finally:
            for queue in queues:
                queue.close(discard=self.failure is not None)

    def _receive(self) -> None:
        def confirm() -> None:
            hit("before_confirm")
            self._stream.confirm(lsn_to_confirm(self._durable.position.lsn))
            hit("after_confirm")
            self._appender.bound.check_session()

        while not self._stop.is_set() and self.failure is None:
            confirm()
            frames = self._stream.receive(0.2, self._batcher.seconds_to_gather(is_copying=self._windows.is_waiting))
            if frames is None:
                continue
            hit("after_receive")
            self._metrics.set(metrics.RECEIVED_BYTES, self._stream.received_bytes, self._pipeline)
            try:
                self._frames.put(frames, frames.nbytes, meanwhile=confirm)
            except QueueClosed:
                return

    def _decode(self) -> None:
        while (frames := self._frames.get()) is not None:
            for item in self._decoding.rows(frames):
                self._rows.put(item, item.nbytes)
                if self._stop.is_set() and self._decoding.spool.is_replaying:
                    self._frames.close(discard=True)  # a replay may take minutes; the server sends it again
                    return
            self._batcher.record_decoded(source_is_idle=frames.ends_with_keepalive)
            self._metrics.set(metrics.SPOOLED_BYTES, self._decoding.spool.nbytes, self._pipeline)

    def _encode(self) -> None:
        while True:
            due = self._batcher.next_due(more=self._rows.has_items)
            try:
                arrived = self._rows.get(None if due is None else max(0.0, due - time.monotonic()))
            except QueueClosed:
                for batch in self._batcher.flush() if self.failure is None else ():
                    self._batches.put(batch, 1)
                return
            now = time.monotonic()
            if arrived is not None:
                self._batcher.add(arrived, now)
            for batch in self._batcher.batches(now, more=self._rows.has_items):
                self._batches.put(batch, 1)

    def _append(self) -> None:
        while (batch := self._batches.get()) is not None:
            if not batch.is_trim:
                self._appender.append(batch)
                self._batcher.record_append(time.monotonic())
            if batch.is_trim or batch.end is not None:
                self._retention.commit_prepared(self._appender.writer)
