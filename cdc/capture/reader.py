"""The reader: the capture loop from the replication stream into the change log.

Four stages run in one thread each: receive, decode, encode, append. Queues between them are bounded by bytes. A full
queue stops reading the socket; status updates continue. Postgres gets only positions that the log contains durably.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Final

from cdc import metrics
from cdc.byte_queue import ByteQueue, QueueClosed
from cdc.capture.allocator import use_system_allocators
from cdc.capture.commit_batcher import CommitBatch, CommitBatcher
from cdc.capture.decode_stage import DecodeStage, LastTransaction
from cdc.capture.initial_snapshot import CopySummary, ensure_initial_snapshot
from cdc.capture.resume_checks import captured_oids, check_source, lineage_of, lsn_to_confirm
from cdc.capture.settings import ReaderSettings
from cdc.capture.slot_ownership import SlotClaim, check_slot_name, record_slot
from cdc.errors import SourceError
from cdc.failpoint import hit
from cdc.log.layout import LogIdentity
from cdc.log.reader import LogReader
from cdc.log.retention_worker import RetentionWorker
from cdc.log.retrying_writer import RetryingWriter
from cdc.log.vacuum import remove_staged_files
from cdc.log.writer import LogWriter, StagedFile
from cdc.pgoutput.decoder_events import DecodedRows
from cdc.pgoutput.frames import FrameBatch
from cdc.pgoutput.load_kernels import load_kernels
from cdc.position import Position
from cdc.postgres.replication import ReplicationStream, StreamOptions, identify_system
from cdc.postgres.source_identity import read_source_state
from cdc.postgres.wal_bound import WalBound
from cdc.snapshot.watermark_window import WatermarkWindows

FRAMES_WAITING: Final = 16 * 1024 * 1024
"""Bytes of raw frames between receive and decode."""
ROWS_WAITING: Final = 32 * 1024 * 1024
"""Bytes of Arrow rows between decode and encode."""


@dataclass(frozen=True, slots=True)
class ReaderStart:
    """What a reader did before its stream was open."""

    position: Position
    """Position after which the log continues."""
    copied: CopySummary | None
    """Initial snapshot that this start has taken; None if the log already had one."""
    compile_seconds: float
    """Time to load the compiled decoder: the first start on a machine compiles it."""


class Reader:
    """Captures one source database into one log; run() returns after a drain, or raises the error that ended it."""

    def __init__(
        self,
        settings: ReaderSettings,
        figures: metrics.Metrics,
        stop: Event,
        windows: WatermarkWindows,
        on_start: Callable[[ReaderStart], None] | None = None,
    ) -> None:
        """on_start: called once the stream is open."""
        self._settings, self._windows = settings, windows
        self._on_start, self._metrics, self._stop = on_start, figures, stop
        self._frames: ByteQueue[FrameBatch] = ByteQueue(FRAMES_WAITING)
        self._rows: ByteQueue[DecodedRows] = ByteQueue(ROWS_WAITING)
        self._batches: ByteQueue[CommitBatch] = ByteQueue(3)  # each counts as 1: three wait while one is written
        self._failure: BaseException | None = None
        self._is_ending = Event()
        """Set once receiving has ended; the writer then stops waiting for storage that is full."""
        self._durable = windows.durable_position
        self._handed_over, self._appended, self._appended_at = 0, 0, 0.0
        self._retention = RetentionWorker(settings.log, settings.retention, self._batches.wake)

    def run(self) -> None:
        """Take the initial snapshot if the log is empty, then stream until stop is set."""
        use_system_allocators()
        source = self._settings.source
        identity = identify_system(source.dsn)
        expected = LogIdentity(system_id=identity.system_id, database=identity.database)
        writer = LogWriter.open(self._settings.log, expected, self._settings.limits)
        copied = ensure_initial_snapshot(source, self._settings.log, writer, self._metrics)
        seconds = self._load_kernels()
        options = StreamOptions(slot=source.slot, publication=source.publication, start=lsn_to_confirm(0))
        # From here on this session owns the slot, so no other reader appends to the log.
        with (
            ReplicationStream.open(source.dsn, options) as stream,
            WalBound(source.dsn) as self._bound,
            self._retention,
        ):
            self._resume()
            if self._on_start is not None:
                self._on_start(ReaderStart(self._durable.position, copied, seconds))
            rows, batches = self._rows, self._batches
            ends = ((self._decode, rows), (self._encode, rows, batches), (self._append, batches))
            stages = [Thread(target=self._guard, args=end, name=end[0].__name__) for end in ends]
            for stage in stages:
                stage.start()
            try:
                self._receive(stream)
            except SourceError:
                stream.close()  # before the queues drain: a server that shuts down waits for this connection
                raise
            finally:
                self._is_ending.set()
                self._frames.close()
                for stage in stages:
                    stage.join()
                self._decoding.close()
            stream.confirm(lsn_to_confirm(self._durable.position.lsn))
            stream.tick()
        if self._failure is not None:
            raise self._failure

    def _load_kernels(self) -> float:
        """Load the compiled decoder; returns the seconds spent."""
        began = time.monotonic()
        self._metrics.set(metrics.COMPILING, 1, self._settings.source.pipeline)
        load_kernels()
        self._metrics.set(metrics.COMPILING, 0, self._settings.source.pipeline)
        return time.monotonic() - began

    def _resume(self) -> None:
        source, reading = self._settings.source, LogReader(self._settings.log)
        known = reading.schemas()

        def blocked(on: bool) -> None:  # noqa: FBT001 - signature of RetryingWriter
            self._metrics.set(metrics.LOG_BLOCKED, on, source.pipeline)

        blocked(False)  # the previous session may have ended while storage was full
        remove_staged_files(self._settings.log)
        self._writer = RetryingWriter(self._settings.log, self._settings.limits, self._is_ending, blocked)
        last = self._writer.last_commit
        assert last is not None, "the initial snapshot has committed"  # noqa: S101
        state = read_source_state(source.dsn, source.slot, source.publication, captured_oids(known))
        claim = SlotClaim.of(self._settings.log, reading)
        check_slot_name(claim, state.slot)
        check_source(self._writer.identity, last, state)
        record_slot(claim, state.slot, state.identity)
        self._lineage = lineage_of(state)
        self._durable.advance(last.last)
        self._metrics.set(metrics.LOG_POSITION, int(self._durable.position), source.pipeline)
        self._decoding = DecodeStage.open(source, self._settings.log, known, self._durable.position, self._windows)
        if state.slot is not None and state.slot.confirmed_flush is not None:
            self._decoding.refuse_before(
                state.slot.confirmed_flush, LastTransaction(self._settings.log, last.last, last.committed_at)
            )

    def _guard(self, stage: Callable[[], None], *pipes: ByteQueue[Any]) -> None:
        """Run a stage; pipes: the queues that it fills or reads, closed when it ends."""
        try:
            stage()
        except QueueClosed:
            pass
        except BaseException as exc:  # noqa: BLE001 - handed to run(), which raises it
            self._failure = self._failure or exc
            self._frames.close(discard=True)
        finally:
            for pipe in pipes:
                pipe.close(discard=self._failure is not None)

    def _receive(self, stream: ReplicationStream) -> None:
        def confirm() -> None:
            hit("before_confirm")
            stream.confirm(lsn_to_confirm(self._durable.position.lsn))
            hit("after_confirm")
            self._bound.check_session()

        while not self._stop.is_set() and self._failure is None:
            confirm()
            frames = stream.receive(0.2)
            if frames is None:
                continue
            hit("after_receive")
            self._metrics.set(metrics.RECEIVED_BYTES, stream.received_bytes, self._settings.source.pipeline)
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
            self._metrics.set(metrics.SPOOLED_BYTES, self._decoding.spool.nbytes, self._settings.source.pipeline)

    def _encode(self) -> None:
        batcher = CommitBatcher(self._settings.commit_bytes, self._settings.linger, self._durable)
        self._durable.on_wait(self._wake_encoder)
        while True:
            due = batcher.next_due(self._free_since, more=self._rows.has_items)
            try:
                arrived = self._rows.get(None if due is None else max(0.0, due - time.monotonic()))
            except QueueClosed:
                for batch in batcher.flush() if self._failure is None else ():
                    self._batches.put(batch, 1)
                return
            if arrived is not None:
                batcher.add(arrived)
            for batch in batcher.batches(time.monotonic(), self._free_since, more=self._rows.has_items):
                self._handed_over += 1
                self._batches.put(batch, 1)

    @property
    def _free_since(self) -> float | None:
        return None if self._handed_over > self._appended else self._appended_at

    def _wake_encoder(self) -> None:
        """Make the encode stage check again whether a commit is due."""
        with suppress(QueueClosed):  # the stage has ended
            self._rows.wake()

    def _append(self) -> None:
        staged = list[StagedFile]()
        while True:
            try:
                batch = self._batches.get()
            except QueueClosed:
                return
            if batch is not None:
                staged = self._append_batch(staged, batch)
                self._appended_at = time.monotonic()
                self._appended += 1
                self._wake_encoder()
            if not staged:
                self._retention.commit_prepared(self._writer)

    def _append_batch(self, staged: list[StagedFile], batch: CommitBatch) -> list[StagedFile]:
        """Stage a batch, and commit all staged files if it ends a transaction; returns the files still staged."""
        end, began = batch.end, time.monotonic()
        if end is not None and end.last <= self._durable.position:
            return []
        if end is not None:
            self._bound.ask(end.last.lsn)
        files = [*staged, *self._writer.stage_encoded(batch.files)]
        if end is None:
            return files
        self._bound.require(end.last.lsn)
        hit("after_data_file")
        pipeline, count = self._settings.source.pipeline, sum(file.rows for file in files)
        self._writer.commit(files, end.info(self._lineage, count))
        hit("after_log_commit")
        self._durable.advance(end.last)
        lag = max(0.0, time.time() - end.committed_at / 1e6) if end.committed_at else None
        nbytes, seconds = sum(file.size for file in files), time.monotonic() - began
        added = metrics.CommitMetrics(count, end.transactions, nbytes, seconds, lag)
        metrics.record_commit(self._metrics, pipeline, int(end.last), added)
        return []
