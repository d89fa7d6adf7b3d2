"""Relations: which version of which table the rows of this session belong to, and what the catalogue says beside it.

Three sources: Relation messages with the rows, the event trigger's messages in the WAL if it is installed, and a look
at the catalogue every half minute for what neither can show. Only the decoding thread writes `s` rows, so what the look
finds waits until that thread asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import structlog

from cdc.errors import CdcError, SourceUnreachable
from cdc.pgoutput.messages import Relation
from cdc.position import Position
from cdc.postgres.column_identity import schema_from_ddl, with_state
from cdc.postgres.connection import ANSWER_TIMEOUT, connect
from cdc.postgres.ddl_messages import parse_ddl_message, with_types
from cdc.postgres.rewrite_detection import CatalogState, find_divergence, read_catalog_states
from cdc.postgres.tables import CatalogView, read_catalog_view, resolve_relation
from cdc.table import ADDED, PARTITION_OF, TableSchema, TableState, matches, topic

CATALOG_CHECK_EVERY: Final = 30.0
"""Seconds between two looks at the catalogue of all tables; one took 8 ms for one table, 80–150 ms for 1,000."""

_T = TypeVar("_T")
log = structlog.get_logger("reader")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFilter:
    """The source as relations are resolved against it."""

    dsn: str
    publication: str
    patterns: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    """Globs of the tables that are asked for, and of those that are not: a publication may have more."""
    copies: bool = False
    """Whether the rows that a table has when it is first seen are wanted as well."""


class SchemaTracker:
    """Resolves Relation messages against the log's own schemas and the source's catalogue; used by one thread."""

    def __init__(
        self,
        watched: CaptureFilter,
        known: Mapping[int, TableSchema],
        epoch: int,
        look_every: float = CATALOG_CHECK_EVERY,
    ) -> None:
        self._dsn, self._publication, self._copies = watched.dsn, watched.publication, watched.copies
        self._patterns, self._exclude = watched.patterns, watched.exclude
        # of two tables that had one OID in two epochs the later is meant
        self._known = {schema.oid: schema for schema in known.values() if _can_receive_rows(schema)}
        self._unannounced: dict[int, TableSchema] = {}
        self._epoch = epoch
        self._every, self._due = look_every, time.monotonic()
        # a look never holds up the stream; the thread goes with this object
        self._looker = ThreadPoolExecutor(1, thread_name_prefix="drift")
        self._look: Future[dict[int, CatalogState]] | None = None
        self._looked_at: dict[int, TableSchema] = {}
        self._looks = 0
        self._conn: Any = None
        self._view: CatalogView | None = None
        self._seen: set[int] = set()

    @property
    def looks(self) -> int:
        """How many looks at the catalogue were taken in."""
        return self._looks

    def take(self, schema: TableSchema) -> None:
        """Go on from this version, which was read at the source and written to the log by somebody else."""
        self._known[schema.oid] = schema

    def see(self, message: Relation, position: Position) -> tuple[TableSchema, bool] | None:
        """The schema of the rows that follow, and whether the log has to be told of it; None if no row is wanted.

        No row is wanted of a table that no rule matches, or that was removed, until it is taken; nor of a partition,
        for rules mean roots. The catalogue shows the present and the message, of the transaction at the position, a
        moment of the past; what cannot be proved comes back flagged `needs_resync`, never guessed.
        """
        before = self._known.get(message.oid)
        if not self._wanted(message, before):
            return None
        known = before or _with_sent_columns(self._unannounced.pop(message.oid, None), message)

        def answer(conn: Any) -> TableSchema | None:
            seen = self._view_of(conn, message.oid, position)
            if before is None and seen.is_partition(message.oid):
                return None
            schema = resolve_relation(conn, message, known, self._epoch, seen)
            sight = seen.sights.get(message.oid)
            return schema if sight is None else _compared(schema, sight)

        schema = self._asked(answer)
        if schema is None:
            return None
        if before is None and self._copies and schema.state is TableState.LIVE:
            schema = schema.flagged(TableState.SNAPSHOTTING, ADDED)
        self._known[message.oid] = schema
        return schema, schema != before

    def _wanted(self, message: Relation, known: TableSchema | None) -> bool:
        if known is not None:
            return not known.removed
        name = topic(message.schema, message.name)
        return matches(name, self._patterns) and not matches(name, self._exclude)

    def _view_of(self, conn: Any, oid: int, position: Position) -> CatalogView:
        """A view no older than the message: for the first one of a table in what waited at the start, one of all."""
        if self._view is None:
            self._view = read_catalog_view(conn, [*self._known, oid], self._publication)
        first = oid not in self._seen and oid in self._view.tables
        self._seen.add(oid)
        if first and position.lsn <= self._view.upto:
            return self._view
        return read_catalog_view(conn, [oid], self._publication)

    def _asked(self, question: Callable[[Any], _T]) -> _T:
        """The answer over one connection that is kept; it is made anew if it broke in between."""
        if self._conn is not None:
            try:
                return question(self._conn)
            except SourceUnreachable:
                self.close()
        self._conn = connect(self._dsn, application_name="cdc catalogue", patience=ANSWER_TIMEOUT)
        return question(self._conn)

    def close(self) -> None:
        """Give the connection back."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def told(self, content: bytes) -> Iterator[TableSchema]:
        """The version that a message of the event trigger tells, if it is of a known table and news."""
        message = parse_ddl_message(content)
        if message is None:
            log.warning("a message with the event trigger's prefix cannot be read", bytes=len(content))
            return
        known = self._known.get(message.oid)
        if known is not None and known.removed:
            return
        if message.table is not None:
            table = message.table
            facts = self._asked(lambda conn: with_types(conn, table))
            schema = schema_from_ddl(facts, known, message.oid, self._epoch)
            if known is None:
                # its first rows will say whether it is published at all
                self._unannounced[message.oid] = schema
                return
        elif known is None:
            return
        elif message.dropped:
            schema = known.flagged(TableState.DROPPED, f"dropped at the source by {message.command}")
        elif message.rewrite is not None:
            schema = with_state(known, known, f"rewritten by {message.command} for {message.rewrite}")
        else:
            return
        yield from self._news(schema, known)

    def drifted(self) -> Iterator[TableSchema]:
        """What a look at the catalogue has found since the last call; never waits for one."""
        if self._look is not None and self._look.done():
            look_made, self._look = self._look, None
            self._due = time.monotonic() + self._every
            try:
                sights = look_made.result()
            except CdcError as exc:
                log.warning("the catalogue cannot be looked at", code=exc.code, message=exc.message)
                return
            self._looks += 1
            for oid, before in self._looked_at.items():
                # one that changed meanwhile was looked at with the change, and waits for the next look
                if self._known.get(oid) is before:
                    yield from self._news(_after_catalog_check(before, sights.get(oid)), before)
        elif self._look is None and time.monotonic() >= self._due:
            self._looked_at = {o: s for o, s in self._known.items() if s.state is not TableState.DROPPED}
            self._look = self._looker.submit(self._ask, list(self._looked_at))

    def _ask(self, oids: list[int]) -> dict[int, CatalogState]:
        with connect(self._dsn, application_name="cdc drift", patience=ANSWER_TIMEOUT) as conn:
            return read_catalog_states(conn, oids, self._publication)

    def _news(self, schema: TableSchema, before: TableSchema) -> Iterator[TableSchema]:
        if schema == before:
            return
        if schema.state is not before.state:
            log.warning("table marked", table=schema.topic, state=schema.state.value, reason=schema.reason)
        self._known[schema.oid] = schema
        if schema.is_partition_now:
            del self._known[schema.oid]  # a table of its own again, it is a new one
        yield schema


def _with_sent_columns(created: TableSchema | None, message: Relation) -> TableSchema | None:
    """A new table as the event trigger reports it, with the computed columns that the publication sends as such."""
    if created is None:
        return None
    sent = {column.name for column in message.columns}
    columns = (replace(column, generated=column.generated and column.name not in sent) for column in created.columns)
    return replace(created, columns=tuple(columns))


def _can_receive_rows(schema: TableSchema) -> bool:
    """Whether rows of the table may still be sent."""
    return schema.state is not TableState.DROPPED or schema.removed


def _after_catalog_check(schema: TableSchema, sight: CatalogState | None) -> TableSchema:
    """The version with what the look says: gone, renamed, diverged, or only seen."""
    if sight is None:
        return schema.flagged(TableState.DROPPED, "the table is no longer at the source")
    if sight.sent_as is not None:
        return schema.flagged(TableState.DROPPED, f"{PARTITION_OF}{sight.sent_as}, under whose name its changes come")
    return replace(_compared(schema, sight), schema=sight.schema, name=sight.name)


def _compared(schema: TableSchema, sight: CatalogState) -> TableSchema:
    return replace(with_state(schema, schema, find_divergence(schema, sight)), standing=sight.standing)
