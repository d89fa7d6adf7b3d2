"""Publisher: keeps the published state of a search server sink, and replaces it with each cut.

Before a driver writes rows, it declares the position that they may reach. After a crash the next driver reads this
position: documents up to it may be newer than the published record. Until the sink has published that position, the
record says `catching_up` for every table.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from cdc.errors import SinkError, SinkFenced, SinkOfAnotherLog
from cdc.position import Position
from cdc.targets.published_record import Published, TableRecord, TargetState
from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.sink_state import (
    OWNER,
    PUBLISHED,
    STARTED,
    PublishedState,
    SinkState,
    Version,
    with_mark,
)
from pipelines.sinks.record_after_batch import WHOLE
from pipelines.sinks.unpublished_parked_rows import UnpublishedParkedRows

MARK_EVERY: Final = 600
"""Seconds between two marks of the published position; documents of deleted rows below an old mark are removed."""


class Publisher:
    """The published state of one sink; only one thread may use an instance."""

    def __init__(self, state: SinkState, sink: str, parked: UnpublishedParkedRows) -> None:
        self._documents, self._sink, self._parked = state, sink, parked
        self._driver = uuid.uuid4().hex
        """Random name of this driver, so that a published record says which driver wrote it."""
        self.floors: dict[str, int] = {}
        """Index → its floor, including those that are not published yet."""
        self.state: PublishedState | None = None
        """The published state; None if nothing was published."""
        self._version: Version | None = None
        self._ahead = self._started = 0

    @property
    def record(self) -> Published | None:
        """The published record; None if nothing was published."""
        return None if self.state is None else self.state.record

    def record_of(self, relation: int) -> TableRecord | None:
        """Return the published record of a table; None if it has none."""
        return None if self.state is None else self.state.record.tables.get(relation)

    def open(self, log_id: str) -> None:
        """Read the published state. Raises SinkOfAnotherLog if the sink belongs to another log."""
        self._documents.create()
        if self._documents.owner() is None:
            self._documents.replace(OWNER, {"log_id": log_id}, None)
        if (owner := self._documents.owner()) != log_id:
            raise SinkOfAnotherLog(
                f"search sink {self._sink!r} was written from another log: {owner!r}",
                remedy="choose another 'index' in 'server', or remove the old indexes from the search server",
            )
        self.load()

    def load(self) -> None:
        """Read the published state again, and drop everything that is not published."""
        found, started = self._documents.published(), self._documents.get(STARTED)
        self.state, self._version = (None, None) if found is None else found
        self.floors = {} if self.state is None else dict(self.state.floors)
        self._started = 0 if started is None else started[0]["upto"]
        published = -1 if self.state is None else self.state.record.position
        self._ahead = self._started if self._started > published else 0
        self._parked.load({} if self.state is None else self._documents.parked(self.state))

    def declare(self, upto: int) -> None:
        """Record how far the rows may reach that this driver writes before the next cut."""
        if upto > self._started:
            self._documents.put(STARTED, {"upto": upto})
            self._started = upto

    def check(self, record: Published) -> None:
        """Raise SinkError if a record is at an earlier position than the published one."""
        if self.state is not None and record.position < self.state.record.position:
            raise SinkError(
                f"search sink {self._sink!r} has published position {Position(self.state.record.position)!s}, so it "
                f"cannot publish {Position(record.position)!s}"
            )

    def replace(self, record: Published, keep_tombstones: float) -> PublishedState | None:
        """Replace the published state, and return the earlier one. Raises SinkFenced if another driver published."""
        before = self.state
        written = PublishedState(
            self._with_unfinished_tables(record),
            {t.target: self.floors[t.target] for t in record.tables.values() if self.floors.get(t.target)},
            self._put_parked(record),
            () if before is None else before.marks,
        )
        written = with_mark(written, int(time.time()), MARK_EVERY, int(keep_tombstones))
        source = {**written.to_source(), "driver": self._driver}
        version = self._documents.replace(PUBLISHED, source, self._version)
        if version is None:
            self.load()
            raise SinkFenced(f"another process published to search sink {self._sink!r} after this process last read it")
        self._version, self.state = version, written
        self._parked.committed(record.tables)
        return before

    def remove_unused(self, before: PublishedState | None, others: Iterable[str]) -> None:
        """Remove parked rows that only an earlier state needed, and other documents by their ids."""
        now = set() if self.state is None else set(self.state.parked.values())
        earlier = set() if before is None else set(before.parked.values())
        for identity in [*sorted(earlier - now), *others]:
            self._documents.delete(identity)

    def _with_unfinished_tables(self, record: Published) -> Published:
        if record.position >= self._ahead:
            self._ahead = 0
            return record
        ahead = TargetState.CATCHING_UP.value
        tables = {r: replace(t, state=ahead) if t.state in WHOLE else t for r, t in record.tables.items()}
        return replace(record, tables=tables)

    def _put_parked(self, record: Published) -> dict[int, str]:
        stored = {} if self.state is None else dict(self.state.parked)
        for relation, rows in self._parked.changed().items():
            identity = self._documents.put_parked(relation, rows, record.position)
            if identity is None:
                stored.pop(relation, None)
            else:
                stored[relation] = identity
        return stored


def open_publisher(client: SearchClient, sink: str, log_id: str, parked: UnpublishedParkedRows) -> Publisher:
    """Return a publisher that has read the published state. sink: name of the sink, or of a staged one."""
    publisher = Publisher(SinkState(client, sink), sink, parked)
    publisher.open(log_id)
    return publisher
