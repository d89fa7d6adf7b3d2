"""Schema tracker: finds the current schema version of every relation in a replication session.

The tracker uses Relation messages in the stream, messages of the DDL event triggers if they are installed, and a query
of the system catalogs every 12 s. The query finds changes that no message shows. Only the decoding thread writes schema
rows, so the results of the query wait until that thread calls detect_drift. On an idle source it does so with each
heartbeat; the queries therefore do not wait for that thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, Final, TypeVar

import structlog

from cdc.errors import CdcError, SourceUnreachable
from cdc.pgoutput.decoder_events import RelationSeen
from cdc.pgoutput.messages import Relation
from cdc.postgres.column_identity import schema_from_ddl, with_state
from cdc.postgres.connection import ANSWER_TIMEOUT, connect
from cdc.postgres.ddl_messages import is_sealed, parse_ddl_message, read_seal, with_types
from cdc.postgres.system_catalog import TRIGGER_SCHEMA
from cdc.postgres.tables import CatalogView, read_catalog_view, resolve_relation
from cdc.postgres.unreplicated_changes import CatalogState, check_attached, find_divergence, read_catalog_states
from cdc.postgres.visibility import await_definition
from cdc.table import ADDED, PARTITION_OF, TableSchema, TableState, matches, topic

CATALOG_CHECK_EVERY: Final = 12.0
"""Seconds between two system catalog queries; a query took 8 ms for one table, and 80–150 ms for 1,000 tables.

The log has a change after this time and one heartbeat, and the catalog a few seconds later: together less than 30 s.
"""
SEAL_QUERY_EVERY: Final = 30.0
"""Seconds between two queries of the event triggers' seal, because of messages that are not authentic."""
DEFINITION_TIMEOUT: Final = 5.0
"""Maximum seconds until the system catalogs show a transaction of the stream that changed a table's definition."""

_T = TypeVar("_T")
log = structlog.get_logger("reader")


@dataclass(frozen=True, slots=True)
class CatalogCheck:
    """What one system catalog query found."""

    compared: Mapping[int, TableSchema]
    """The schema versions when the query began, by OID."""
    states: Mapping[int, CatalogState]
    """What the system catalogs have, by OID; without tables that do not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFilter:
    """Source, publication and table rules, which decide which relations are captured."""

    dsn: str
    publication: str
    patterns: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    """Globs of tables that are not captured, even if one of `patterns` matches them."""
    copies: bool = False
    """True if the reader copies the existing rows of a table that it finds while it streams."""


class SchemaTracker:
    """Current schema versions of the tables in one replication session, by OID; used by one thread."""

    def __init__(
        self,
        capture_filter: CaptureFilter,
        schemas: Mapping[int, TableSchema],
        epoch: int,
        check_every: float = CATALOG_CHECK_EVERY,
    ) -> None:
        self._dsn = capture_filter.dsn
        self._publication = capture_filter.publication
        self._copies = capture_filter.copies
        self._patterns, self._exclude = capture_filter.patterns, capture_filter.exclude
        # an OID may occur in two epochs: the later table wins
        self._known = {schema.oid: schema for schema in schemas.values() if _can_receive_rows(schema)}
        self._unannounced: dict[int, TableSchema] = {}
        self._epoch = epoch
        self._every, self._due = check_every, time.monotonic()
        self._closed = Event()
        # queries run in a thread of their own, so that they never delay the stream
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="drift")
        self._check: Future[CatalogCheck | None] | None = None
        self._checks = 0
        self._seal: str | None = None
        self._seal_every, self._seal_due = SEAL_QUERY_EVERY, time.monotonic()
        self._conn: Any = None
        self._view: CatalogView | None = None
        self._seen: set[int] = set()

    @property
    def checks(self) -> int:
        """Number of system catalog queries whose results were applied."""
        return self._checks

    @property
    def has_check_result(self) -> bool:
        """Whether a system catalog query has ended whose result the next call of detect_drift applies."""
        return self._check is not None and self._check.done()

    def set_schema(self, schema: TableSchema) -> None:
        """Use this schema version of the table from now on.

        The caller has copied the table: it read this schema at the source and wrote the schema to the log.
        """
        self._known[schema.oid] = schema

    def resolve_relation(self, event: RelationSeen) -> tuple[TableSchema, bool] | None:
        """Return the schema of the rows after a Relation message, and True if the log needs an `s` row for this schema.

        Returns None if the table is not captured: no rule matches the table, it was removed from the definition, or it
        is a partition, because rules match only partition roots. The Relation message shows the table at an earlier
        time than the system catalogs. If message and catalogs contradict each other, the state is `needs_resync`.
        Raises CommitNotVisible if the catalogs do not show what the message's transaction did to the table.
        """
        message = event.relation
        before = self._known.get(message.oid)
        if not self._is_captured(message, before):
            return None
        earlier = before or _with_sent_columns(self._unannounced.pop(message.oid, None), message)

        def answer(conn: Any) -> TableSchema | None:
            seen = self._view_of(conn, event)
            if before is None and seen.is_partition(message.oid):
                return None
            schema = resolve_relation(conn, message, earlier, self._epoch, seen)
            current = seen.states.get(message.oid)
            return schema if current is None else _compared(schema, check_attached(conn, schema, current), earlier)

        schema = self._query(answer)
        if schema is None:
            return None
        if before is None and self._copies and schema.state is TableState.LIVE:
            schema = schema.flagged(TableState.SNAPSHOTTING, ADDED)
        self._known[message.oid] = schema
        return schema, schema != before

    def _is_captured(self, message: Relation, earlier: TableSchema | None) -> bool:
        if earlier is not None:
            return not earlier.removed
        name = topic(message.schema, message.name)
        return message.schema != TRIGGER_SCHEMA and matches(name, self._patterns) and not matches(name, self._exclude)

    def _view_of(self, conn: Any, event: RelationSeen) -> CatalogView:
        """Return a view of the system catalogs that is not older than the Relation message.

        The first Relation messages of all tables share one view, unless their transaction is later than the view.
        """
        oid = event.relation.oid
        if self._view is None:
            self._view = read_catalog_view(conn, [*self._known, oid], self._publication)
        first = oid not in self._seen and oid in self._view.tables
        self._seen.add(oid)
        if first and self._view.shows(event.position, event.xid):
            return self._view
        await_definition(conn, oid, event.xid, DEFINITION_TIMEOUT)
        return read_catalog_view(conn, [oid], self._publication)

    def _query(self, question: Callable[[Any], _T]) -> _T:
        """Run a query over one persistent connection; if the connection broke, reconnect and repeat the query once."""
        if self._conn is not None:
            try:
                return question(self._conn)
            except SourceUnreachable:
                self._disconnect()
        self._conn = connect(self._dsn, application_name="cdc catalogs", timeout=ANSWER_TIMEOUT)
        return question(self._conn)

    def close(self) -> None:
        """End the queries of the source's system catalogs, and close the connection to them."""
        self._closed.set()
        self._checker.shutdown(wait=False)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def is_authentic(self, content: bytes) -> bool:
        """Return True if the event triggers of the source wrote a DDL message.

        Every role that can connect can write messages with the prefix. So a message that is not authentic changes
        nothing and leads to at most one query in 30 s, which may find triggers that were installed since.
        """
        if is_sealed(content, self._seal):
            return True
        if time.monotonic() >= self._seal_due:
            self._seal = self._query(read_seal)
            self._seal_due = time.monotonic() + self._seal_every
            if is_sealed(content, self._seal):
                return True
            log.warning(
                "ignored DDL messages that the event triggers of this version of cdc did not write; "
                "system catalog queries still find schema changes",
                fix="if an earlier version installed the triggers, run 'cdc source install -c FILE'",
            )
        return False

    def apply_ddl(self, content: bytes) -> Iterator[TableSchema]:
        """Yield the new schema version that an authentic DDL message describes.

        Yields nothing for a table that is not captured, and for a message that is not authentic or malformed.
        """
        message = parse_ddl_message(content) if self.is_authentic(content) else None
        if message is None:
            return
        earlier = self._known.get(message.oid)
        if earlier is not None and earlier.removed:
            return
        if message.table is not None:
            table = message.table
            facts = self._query(lambda conn: with_types(conn, table))
            schema = schema_from_ddl(facts, earlier, message.oid, self._epoch)
            if earlier is None:
                # its first Relation message shows whether the table is published
                self._unannounced[message.oid] = schema
                return
        elif earlier is None:
            if message.dropped:
                self._unannounced.pop(message.oid, None)
            return
        elif message.dropped:
            schema = earlier.flagged(TableState.DROPPED, f"the source dropped the table: {message.command}")
        elif message.rewrite is not None:
            schema = with_state(earlier, earlier, f"{message.command} rewrote the table: {message.rewrite}")
        else:
            return
        yield from self._changed(schema, earlier)

    def detect_drift(self) -> Iterator[TableSchema]:
        """Yield the schema versions that changed since the last call, as the last system catalog query found them.

        The method never waits for a query: the next one begins when it is due, in its own thread.
        """
        if self._check is None:
            self._check = self._checker.submit(self._query_when_due)
        elif self._check.done():
            ended, self._check = self._check, self._checker.submit(self._query_when_due)
            yield from self._compare(ended)

    def _compare(self, ended: Future[CatalogCheck | None]) -> Iterator[TableSchema]:
        try:
            check = ended.result()
        except CdcError as exc:
            log.warning(
                "cannot query the system catalogs; the next query finds schema changes that pgoutput does not send",
                code=exc.code,
                message=exc.message,
            )
            return
        if check is None:
            return
        self._checks += 1
        for oid, before in check.compared.items():
            # a table that changed during the query waits for the next one
            if self._known.get(oid) is before:
                yield from self._changed(_after_catalog_check(before, check.states.get(oid)), before)

    def _query_when_due(self) -> CatalogCheck | None:
        """Wait until the next query is due, and return what it finds; None if the tracker was closed before."""
        if self._closed.wait(max(0.0, self._due - time.monotonic())):
            return None
        try:
            return self._read_catalog()
        finally:
            self._due = time.monotonic() + self._every

    def _read_catalog(self) -> CatalogCheck:
        schemas = self._known.copy()  # in one step: the decoding thread may change the original
        compared = {oid: schema for oid, schema in schemas.items() if schema.state is not TableState.DROPPED}
        with connect(self._dsn, application_name="cdc drift", timeout=ANSWER_TIMEOUT) as conn:
            states = read_catalog_states(conn, list(compared), self._publication)
            return CatalogCheck(
                compared, {oid: check_attached(conn, compared[oid], state) for oid, state in states.items()}
            )

    def _changed(self, schema: TableSchema, before: TableSchema) -> Iterator[TableSchema]:
        if schema == before:
            return
        if schema.state is not before.state:
            log.warning(
                "the state of a table changed; if 'state' is 'needs_resync', run 'cdc tables resync' for the table",
                table=schema.topic,
                state=schema.state.value,
                reason=schema.reason,
            )
        self._known[schema.oid] = schema
        if schema.is_partition_now:
            del self._known[schema.oid]  # once detached, it counts as a new table
        yield schema


def _with_sent_columns(created: TableSchema | None, message: Relation) -> TableSchema | None:
    """Return a copy of the table in which each generated column that the server sends is an ordinary column.

    created: the new table as the event trigger described it. Returns None if `created` is None.
    """
    if created is None:
        return None
    sent = {column.name for column in message.columns}
    columns = (replace(column, generated=column.generated and column.name not in sent) for column in created.columns)
    return replace(created, columns=tuple(columns))


def _can_receive_rows(schema: TableSchema) -> bool:
    """Return True if the stream may still contain rows of the table."""
    return schema.state is not TableState.DROPPED or schema.removed


def _after_catalog_check(schema: TableSchema, current: CatalogState | None) -> TableSchema:
    """Return the schema version after a system catalog query: dropped, renamed, in need of a resync, or unchanged."""
    if current is None:
        return schema.flagged(TableState.DROPPED, "the table no longer exists at the source")
    if current.sent_as is not None:
        return schema.flagged(
            TableState.DROPPED, f"{PARTITION_OF}{current.sent_as}: pgoutput sends its changes under that name"
        )
    return replace(_compared(schema, current), schema=current.schema, name=current.name).following(schema)


def _compared(schema: TableSchema, current: CatalogState, before: TableSchema | None = None) -> TableSchema:
    doubt = find_divergence(schema, current, before)
    return replace(with_state(schema, schema, doubt), standing=current.fingerprint)
