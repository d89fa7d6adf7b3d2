"""Decoding: the stage between receive and append, from frames of one replication session to log rows.

Only commits, and messages outside of transactions, become positions. A keepalive also names how far the server has
sent its WAL, but nothing in the stream proves it: one false WAL end would lose every row up to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from cdc.capture.initial_snapshot import CopySource
from cdc.capture.schema_tracker import CaptureFilter, SchemaTracker
from cdc.capture.spool import Spool
from cdc.config.definition import SnapshotMode
from cdc.log.object_path import Root
from cdc.log.reader import LogReader
from cdc.lsn import Lsn
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.decoder_events import DdlSeen, Decoded, RelationSeen, SignalSeen, WatermarkSeen
from cdc.pgoutput.frames import FrameBatch
from cdc.pgoutput.kernel import BEGIN
from cdc.pgoutput.lsn_check import LsnCheck
from cdc.pgoutput.messages import BeginMessage, Keepalive
from cdc.pgoutput.parse import parse_frame
from cdc.pgoutput.streamed import kind_set, next_of, readonly_arrays
from cdc.position import Position
from cdc.postgres.text_repair import RepairFrames, frame_text_repair, unchanged
from cdc.snapshot.watermark_window import WatermarkWindows
from cdc.table import TableSchema

_BEGINS: Final = kind_set(bytes([BEGIN]))


@dataclass(frozen=True, slots=True)
class LastTransaction:
    """The last one of a log."""

    root: Root
    position: Position
    committed_at: int
    """Microseconds UTC since 1970."""

    def is_same(self, begin: BeginMessage) -> bool:
        """Whether this is its Begin, by commit time and xid; the log is read only where the time is the same."""
        if begin.committed_at != self.committed_at:
            return False
        found = LogReader(self.root).rows(Position(self.position - 1), self.position)
        return any(begin.xid in rows["xid"].unique().to_pylist() for rows in found)


class DecodeStage:
    """Spool, decoder and relations of one session; used by one thread."""

    def __init__(
        self,
        spool: Spool,
        relations: SchemaTracker,
        after: Position,
        placing: WatermarkWindows,
        mend: RepairFrames = unchanged,
    ) -> None:
        self.spool = spool
        self._mend = mend
        self._placing, self._inbox = placing, placing.inbox
        self._relations = relations
        self._decoder = ColumnarDecoder(epoch=after.epoch, after=after)
        self._lsns = LsnCheck(Lsn(0))
        self._after = after
        self._last: LastTransaction | None = None
        self._resolved: dict[int, tuple[RelationSeen, TableSchema]] = {}

    @classmethod
    def open(
        cls,
        source: CopySource,
        root: Root,
        known: Mapping[int, TableSchema],
        after: Position,
        placing: WatermarkWindows,
    ) -> Self:
        """Go on behind `after` with the schemas that the log knows.

        Large transactions are spooled beside the log under root, or where this machine keeps temporary files.
        """
        copies = source.snapshot.mode is not SnapshotMode.NO_DATA
        watched = CaptureFilter(
            dsn=source.dsn,
            publication=source.publication,
            patterns=source.patterns,
            exclude=source.exclude,
            copies=copies,
        )
        relations = SchemaTracker(watched, known, after.epoch)
        placing.begin(after, known)
        return cls(
            Spool(root if isinstance(root, Path) else None),
            relations,
            after,
            placing,
            frame_text_repair(source.dsn, source.undecodable, after),
        )

    def expect_from(self, confirmed: Lsn, last: LastTransaction) -> None:
        """Refuse transactions that ended before this LSN, which the slot had confirmed when the session began.

        last: of the log that the session continues; it is dropped if it comes first under a higher LSN.
        """
        self._lsns, self._last = LsnCheck(confirmed), last

    def close(self) -> None:
        """Drop what waits, and give files and connection back."""
        self._placing.end()
        self.spool.close()
        self._relations.close()

    def rows(self, frames: FrameBatch) -> Iterator[Decoded]:
        """Rows in the order of the commits."""
        for schema in self._relations.drifted():
            self._announce(schema)
        for whole in self.spool.whole(frames):
            if self._last is not None:
                self._skip_known(whole)
            for event in self._decoder.decode(self._mend(self._lsns.checked(whole))):
                if isinstance(event, RelationSeen):
                    self._define(event)
                elif isinstance(event, DdlSeen):
                    for version in self._relations.told(event.content):
                        self._announce(version)
                elif isinstance(event, WatermarkSeen):
                    yield from self._place(event)
                elif not isinstance(event, Keepalive):
                    yield from self._keep(event)

    def _skip_known(self, frames: FrameBatch) -> None:
        """Drop the log's last transaction if the first one behind it is the same one under a higher LSN.

        No field of the stream repeats the LSN of a streamed transaction's commit. If a false one was too low, what
        was confirmed is too low as well, and the server sends the transaction again.
        """
        place = -1
        while self._last and (place := next_of(*readonly_arrays(frames), place + 1, _BEGINS)) < len(frames):
            begin = parse_frame(frames[place])
            if not isinstance(begin, BeginMessage) or begin.final_lsn <= self._after.lsn:
                continue
            if self._last.is_same(begin):
                self._decoder.skip_to(Position.of(begin.final_lsn, self._after.epoch))
            self._last = None

    def _keep(self, event: SignalSeen | Decoded) -> Iterator[Decoded]:
        """Signals are on disk before the log can hold the transaction that they came in."""
        if isinstance(event, SignalSeen):
            if self._inbox is not None:
                self._inbox.message(event)
            return
        self._placing.note(event)
        if self._inbox is not None:
            self._inbox.rows(event.rows)
        yield event

    def _place(self, seen: WatermarkSeen) -> Iterator[Decoded]:
        """Rows that were read beside the stream, as rows of the watermark's own transaction."""
        schema, batches = self._placing.place(seen)
        if schema is not None:
            self._resolved.clear()
            self._relations.take(schema)
            if schema.removed:
                self._decoder.ignore(schema.oid)
            else:
                self._decoder.define(schema, announce=False)
        for batch in batches:
            self._decoder.leave_room(batch.num_rows)
            yield Decoded(batch, 0, None, 0, 0, copied=True)

    def _announce(self, schema: TableSchema) -> None:
        self._resolved.clear()
        self._placing.learn(schema)
        if self._inbox is not None:
            self._inbox.learn(schema)
        self._decoder.announce(schema)

    def _define(self, seen: RelationSeen) -> None:
        """Resolve a Relation message, but for one that its own transaction repeats.

        After every rollback to a savepoint the server describes a streamed transaction's relations again, thousands
        of times. Each look at the catalogue comes after that transaction's commit, so a second one tells nothing new.
        """
        before, schema = self._resolved.get(seen.relation.oid, (None, None))
        if schema is not None and before == seen:
            self._decoder.define(schema, announce=False)
            return
        if (found := self._relations.see(seen.relation, seen.position)) is None:
            self._decoder.ignore(seen.relation.oid)
            return
        schema, announce = found
        self._resolved[seen.relation.oid] = seen, schema
        if announce:
            self._placing.learn(schema)
        if self._inbox is not None:
            self._inbox.learn(schema)
        self._decoder.define(schema, announce=announce)
