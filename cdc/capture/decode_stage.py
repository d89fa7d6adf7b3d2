"""Decode stage: turns the frames of one replication session into log rows.

Only commits, and logical messages outside transactions, advance the position. The WAL end in a keepalive does not:
nothing in the stream confirms it, and a false WAL end would lose every row below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from cdc.bucket_files import Root
from cdc.capture.schema_tracker import CaptureFilter, SchemaTracker
from cdc.capture.settings import SourceSettings
from cdc.capture.spool import Spool
from cdc.log.encoded_chunk import PlacedChunk
from cdc.log.reader import LogReader
from cdc.log_row import DDL_PREFIX, WATERMARK_PREFIX
from cdc.lsn import Lsn
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.decoder_events import DdlSeen, DecodedRows, RelationSeen, SignalSeen, WatermarkSeen
from cdc.pgoutput.kernel import BEGIN
from cdc.pgoutput.lsn_check import LsnCheck
from cdc.pgoutput.message_parser import FrameBatch, parse_frame
from cdc.pgoutput.messages import BeginMessage, Keepalive
from cdc.pgoutput.stream_blocks import kind_set, next_of, readonly_arrays
from cdc.position import Position
from cdc.postgres.sql_ascii import RepairFrames, frame_text_repair, unchanged
from cdc.snapshot.debezium_signal_queue import SignalQueue
from cdc.snapshot.watermark_window import WatermarkWindows
from cdc.table import TableSchema

_BEGINS: Final = kind_set(bytes([BEGIN]))


@dataclass(frozen=True, slots=True)
class LastTransaction:
    """The last transaction of the log, to recognise a transaction that the server sends a second time."""

    root: Root
    position: Position
    committed_at: int
    """Commit time in microseconds UTC since 1970."""

    def is_same(self, begin: BeginMessage) -> bool:
        """Return True if a Begin message has this transaction's commit time and the xid of one of its log rows."""
        if begin.committed_at != self.committed_at:
            return False
        batches = LogReader(self.root).rows(Position(self.position - 1), self.position)
        return any(begin.xid in rows["xid"].unique().to_pylist() for rows in batches)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The position at which a replication session continues the log, with the log's state at this position."""

    position: Position
    schemas: Mapping[int, TableSchema] = field(default_factory=dict)
    """Latest schema version of each relation in the log, by relation number."""
    confirmed: Lsn | None = None
    """Confirmed LSN of the slot when the session starts; a received transaction that ended before it is an error."""
    last: LastTransaction | None = None
    """Last transaction of the log; the session skips it if the server sends it again under a higher LSN."""


@dataclass(frozen=True, slots=True)
class StreamObservers:
    """Objects that see all decoded rows and signals before the log can commit them."""

    windows: WatermarkWindows = field(default_factory=WatermarkWindows)
    signals: SignalQueue | None = None
    """Queue that stores the signals of the stream; None if signals are ignored."""


class DecodeStage:
    """Spool, decoder and schema tracker of one replication session; used by one thread."""

    def __init__(
        self,
        spool: Spool,
        relations: SchemaTracker,
        resume: ResumePoint,
        observers: StreamObservers,
        repair_frames: RepairFrames = unchanged,
    ) -> None:
        self.spool = spool
        self._repair_frames = repair_frames
        self._windows, self._signals = observers.windows, observers.signals
        self._relations = relations
        self._after, self._last = resume.position, resume.last
        self._decoder = ColumnarDecoder(epoch=self._after.epoch, after=self._after)
        self._decoder.takes = self._takes
        self._lsns = LsnCheck(resume.confirmed or Lsn(0))
        self._resolved: dict[int, tuple[RelationSeen, TableSchema]] = {}

    @classmethod
    def open(
        cls,
        source: SourceSettings,
        root: Root,
        resume: ResumePoint,
        observers: StreamObservers,
    ) -> Self:
        """Return the decode stage of a new replication session, which continues the log at the resume point.

        Large transactions are spooled in the log's directory, or in the temporary directory if the log is remote.
        """
        capture_filter = CaptureFilter(
            dsn=source.dsn,
            publication=source.publication,
            patterns=source.patterns,
            exclude=source.exclude,
            copies=source.copies_rows,
        )
        relations = SchemaTracker(capture_filter, resume.schemas, resume.position.epoch)
        observers.windows.start_session(resume.position, resume.schemas)
        return cls(
            Spool(root if isinstance(root, Path) else None),
            relations,
            resume,
            observers,
            frame_text_repair(source.dsn, source.undecodable, resume.position),
        )

    def close(self) -> None:
        """Discard spooled transactions, and close their files and the connection to the source's system catalogs."""
        self._windows.end_session()
        self.spool.close()
        self._relations.close()

    def rows(self, frames: FrameBatch) -> Iterator[DecodedRows | PlacedChunk]:
        """Yield the log rows of the frames in commit order, with the rows of chunks whose watermark arrives.

        Rows that an executor encoded are yielded as a PlacedChunk; they belong to the transaction of the next rows.
        """
        for schema in self._relations.detect_drift():
            self._announce(schema)
        for whole in self.spool.committed(frames):
            if self._last is not None:
                self._skip_known(whole)
            for event in self._decoder.decode(self._repair_frames(self._lsns.checked(whole))):
                if isinstance(event, RelationSeen):
                    self._define(event)
                elif isinstance(event, DdlSeen):
                    for version in self._relations.apply_ddl(event.content):
                        self._announce(version)
                elif isinstance(event, WatermarkSeen):
                    yield from self._insert_chunk(event)
                elif not isinstance(event, Keepalive):
                    yield from self._pass_on(event)

    def _takes(self, prefix: str, content: bytes) -> bool:
        """Return True if a message with a prefix of cdc comes from cdc, or is a signal that may be accepted."""
        if prefix == DDL_PREFIX:
            return self._relations.is_authentic(content)
        if prefix == WATERMARK_PREFIX:
            return self._windows.has_window(content)
        return self._signals is not None and self._signals.takes(content)

    def _skip_known(self, frames: FrameBatch) -> None:
        """Skip the log's last transaction if the server sends it again under a higher LSN.

        This happens if a streamed transaction arrived with a corrupt commit LSN that was too low. The stream contains
        that LSN only once, so nothing detects the corruption. The reader then confirms too low an LSN, and the server
        sends the transaction a second time.
        """
        index = -1
        while self._last and (index := next_of(*readonly_arrays(frames), index + 1, _BEGINS)) < len(frames):
            begin = parse_frame(frames[index])
            if not isinstance(begin, BeginMessage) or begin.final_lsn <= self._after.lsn:
                continue
            if self._last.is_same(begin):
                self._decoder.skip_to(Position.of(begin.final_lsn, self._after.epoch))
            self._last = None

    def _pass_on(self, event: SignalSeen | DecodedRows) -> Iterator[DecodedRows]:
        """Store the signals that an event contains, then yield the event if it consists of rows.

        Signals are on disk before the log can commit the transaction that contains them.
        """
        if isinstance(event, SignalSeen):
            if self._signals is not None:
                self._signals.store_message(event)
            return
        self._windows.observe(event)
        if self._signals is not None:
            self._signals.store_rows(event.rows)
        yield event

    def _insert_chunk(self, seen: WatermarkSeen) -> Iterator[DecodedRows | PlacedChunk]:
        """Yield the rows of the chunk that the watermark closes, as rows of the watermark's own transaction."""
        schema, batches = self._windows.batches_at_watermark(seen)
        if schema is not None:
            self._resolved.clear()
            self._relations.set_schema(schema)
            if schema.removed:
                self._decoder.ignore(schema.oid)
            else:
                self._decoder.define(schema, announce=False)
        for batch in batches:
            if isinstance(batch, PlacedChunk):
                self._decoder.leave_room(batch.rows)
                yield batch
                continue
            self._decoder.leave_room(batch.num_rows)
            yield DecodedRows(batch, 0, None, 0, 0, copied=True)

    def _announce(self, schema: TableSchema) -> None:
        self._resolved.clear()
        self._windows.set_schema(schema)
        if self._signals is not None:
            self._signals.set_schema(schema)
        self._decoder.announce(schema)

    def _define(self, seen: RelationSeen) -> None:
        """Resolve a Relation message; reuse the result if the message repeats an earlier one of the same transaction.

        After every rollback to a savepoint the server repeats the Relation messages of a streamed transaction, up to
        thousands of times. The spool delivers all of them after the commit, so they would resolve to the same schema.
        """
        before, schema = self._resolved.get(seen.relation.oid, (None, None))
        if schema is not None and before == seen:
            self._decoder.define(schema, announce=False)
            return
        if (resolved := self._relations.resolve_relation(seen)) is None:
            self._decoder.ignore(seen.relation.oid)
            return
        schema, announce = resolved
        self._resolved[seen.relation.oid] = seen, schema
        if announce:
            self._windows.set_schema(schema)
        if self._signals is not None:
            self._signals.set_schema(schema)
        self._decoder.define(schema, announce=announce)
