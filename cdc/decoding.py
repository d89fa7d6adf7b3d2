"""Decoding: the stage between receive and append, from frames of one replication session to log rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from cdc.mending import MendFrames, frame_mender, unchanged
from cdc.pgoutput.columnar import ColumnarDecoder
from cdc.pgoutput.frames import FrameBatch
from cdc.pgoutput.messages import Keepalive
from cdc.pgoutput.transactions import DdlSeen, Decoded, RelationSeen
from cdc.position import Position
from cdc.relations import Relations
from cdc.snapshot.initial import CopySource
from cdc.spool import Spool
from cdc.table import TableSchema


class Decoding:
    """Spool, decoder and relations of one session; used by one thread."""

    def __init__(self, spool: Spool, relations: Relations, after: Position, mend: MendFrames = unchanged) -> None:
        self.spool = spool
        self._mend = mend
        self._relations = relations
        self._decoder = ColumnarDecoder(epoch=after.epoch, after=after)
        self._epoch = after.epoch

    @classmethod
    def open(cls, source: CopySource, directory: Path, known: Mapping[int, TableSchema], after: Position) -> Self:
        """Go on behind `after` with the schemas that the log knows; large transactions are spooled in directory."""
        relations = Relations(source.dsn, known, after.epoch, source.publication)
        return cls(Spool(directory), relations, after, frame_mender(source.dsn, source.undecodable, after))

    def close(self) -> None:
        """Drop what waits, and give files and connection back."""
        self.spool.close()
        self._relations.close()

    def rows(self, frames: FrameBatch) -> Iterator[Decoded | Position]:
        """Rows in the order of the commits, and the position of every keepalive that asks for a reply."""
        for schema in self._relations.drifted():
            self._decoder.announce(schema)
        for whole in self.spool.whole(frames):
            for event in self._decoder.decode(self._mend(whole)):
                if isinstance(event, RelationSeen):
                    schema, announce = self._relations.see(event.relation, event.position)
                    self._decoder.define(schema, announce=announce)
                elif isinstance(event, DdlSeen):
                    for version in self._relations.told(event.content):
                        self._decoder.announce(version)
                elif not isinstance(event, Keepalive):
                    yield event
                elif event.reply_requested:
                    yield Position.of(event.wal_end - 1, self._epoch)
