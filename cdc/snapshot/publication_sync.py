"""Publication sync: keeps the publication in Postgres and the log in agreement with the definition's table rules.

A table that a rule newly matches is added to the publication and the log, and then copied. A table that no rule matches
any more is removed from the publication and marked as dropped in the log. A dropped table that no rule matches any more
is marked once more, which takes it off the lists of tables. A table that cannot be added to the publication, or whose
capture would break writes at the source, is refused with a reason.

The thread of this module also runs the commands CHECK_TABLES and SKIP_TABLES. Backfills run in another thread, so that
a new table is added while a long copy runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from glob import escape
from threading import Thread
from typing import Any, Final

import structlog

from cdc.catalog import Catalog, Command
from cdc.config import Definition
from cdc.config.source import SnapshotMode
from cdc.errors import CatalogUnavailable, CdcError, PreflightFailed, Reaction, complete_remedy
from cdc.postgres.column_identity import EPOCH_SHIFT
from cdc.postgres.connection import connect
from cdc.postgres.preflight import SourceRequirements, preflight
from cdc.postgres.publication import (
    PublicationControl,
    drop_table,
    ensure_publication,
    published_schema,
    read_publication,
)
from cdc.postgres.tables import TableName, match_tables, read_schema, uncapturable_tables
from cdc.snapshot.chunk_sender import (
    ChunkSender,
    ReaderLink,
    complete_table_chunk,
    not_copyable_error,
    schema_chunk,
    schema_from_catalog,
    with_state,
)
from cdc.snapshot.reader_commands import CHECK_TABLES, SKIP_TABLES, check_not_copying
from cdc.table import ADDED, REMOVED, TableSchema, TableState, matches

SYNC_EVERY: Final = 30.0
"""Seconds between two comparisons of the table rules with the captured tables."""
POLL: Final = 1.0
"""Seconds between two polls of the catalog; a poll takes one or two milliseconds."""
SYNC_EVERY_DUPLICATE: Final = 2.0
"""Seconds between two comparisons of table rules and captured tables, while two captured tables share a name.

This occurs after a table was dropped and created again.
"""
TABLE_GONE: Final = "the source no longer has the table"

log = structlog.get_logger("tables")


@dataclass(frozen=True, slots=True)
class TableDifference:
    """Difference between the tables that the table rules match and the captured tables."""

    added: Mapping[int, TableName]
    """Tables to add, by OID."""
    removed: tuple[TableSchema, ...]
    missing: tuple[TableSchema, ...]
    """Captured tables that were dropped at the source, or that can no longer be captured."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """Result of one publication sync: the topics of added and removed tables, and the refused tables."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Topic → code, reason and SQL as one text, for each table that a rule matches but that cannot be captured."""
    unread: str | None = None
    """Message of the error with which loading the definition failed; None without an error.

    After an error, the previous table rules apply.
    """

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON document for the catalog."""
        return asdict(self)


def compare_tables(
    known: list[TableSchema], wanted: Mapping[int, TableName], existing: Mapping[int, TableName]
) -> TableDifference:
    """Compare the captured tables with the tables that the rules match.

    `known` contains the tables of the log. `wanted` contains the names of the matched tables by OID. `existing`
    contains the names of all existing tables by OID.
    """
    captured = {schema.oid: schema for schema in known if schema.state is not TableState.DROPPED}
    added = {oid: name for oid, name in wanted.items() if oid not in captured}
    removed = tuple(s for oid, s in captured.items() if oid in existing and oid not in wanted)
    missing = tuple(s for oid, s in captured.items() if oid not in existing)
    return TableDifference(added, removed, missing)


def dropped_tables(known: Iterable[TableSchema]) -> list[TableSchema]:
    """Return the tables that the source dropped, and of which the log does not say that the definition lost them."""
    dropped = (schema for schema in known if schema.state is TableState.DROPPED)
    return [schema for schema in dropped if not schema.removed and not schema.is_partition_now]


def _is_included(topic: str, definition: Definition) -> bool:
    return matches(topic, definition.patterns) and not matches(topic, definition.excludes)


class PublicationSync:
    """Adds tables to the capture of one reader and removes tables from it; not thread-safe."""

    def __init__(
        self,
        reload: Callable[[], Definition],
        definition: Definition,
        link: ReaderLink,
    ) -> None:
        """`reload` returns the current definition; only changes of its table rules take effect."""
        self._reload, self._definition, self._link = reload, definition, link
        self._refused: Mapping[str, str] = {}
        self._unread: str | None = None

    def run_once(self) -> SyncResult | None:
        """Compare the table rules with the captured tables once, and add and remove tables.

        Returns None if no replication session is streaming.
        """
        unread = self._reread()
        known = self._link.windows.schemas()
        definition, source = self._definition, self._definition.source
        if not known:
            return None
        with connect(source.current_dsn(), application_name="cdc tables") as conn:
            wanted = dict(match_tables(conn, definition.patterns, definition.excludes))
            existing = dict(match_tables(conn, ["*"]))
            found = compare_tables(known, wanted, existing)
            gone = [schema for schema in found.missing if read_schema(conn, schema.oid) is None]
            cleared = [s for s in dropped_tables(known) if not _is_included(s.topic, definition)]
            fit, wrong = self._capturable(found.added)
            captured = {schema.oid for schema in known if schema.state is not TableState.DROPPED}
            unfit = uncapturable_tables(conn, definition.patterns, definition.excludes)
            refused = self._log_refused(
                wrong | {str(t.name): _refusal_text(t.name, t.reason, t.sql) for t in unfit if t.oid not in captured}
            )
            if not fit and not found.removed and not gone and not cleared:
                return SyncResult(refused=refused, unread=unread)
            with connect(source.current_primary(), application_name="cdc watermarks") as primary:
                stream = ChunkSender(primary, self._link)
                # first, because a new table may have the same name
                for schema in gone:
                    self._mark(stream, schema, TABLE_GONE if _is_included(schema.topic, definition) else REMOVED)
                added = self._add(conn, primary, stream, fit)
                for schema in found.removed:
                    self._remove(primary, stream, schema, existing[schema.oid])
                for schema in cleared:
                    self._mark(stream, schema, REMOVED)
        removed = (*(str(existing[schema.oid]) for schema in found.removed), *(schema.topic for schema in cleared))
        return SyncResult(added, removed, refused, unread)

    def skip(self, chosen: TableSchema) -> None:
        """Mark a table as live without a copy.

        If the table needs a resync, its schema is read from the source. Then the method raises ConfigError if the table
        no longer exists, or if its columns differ from those of an earlier epoch.
        """
        source = self._definition.source
        with (
            connect(source.current_dsn(), application_name="cdc tables") as conn,
            connect(source.current_primary(), application_name="cdc watermarks") as primary,
        ):
            stream = ChunkSender(primary, self._link)
            epoch = stream.durable_position.epoch

            def build(version: TableSchema | None) -> Any:
                current = version or chosen
                if current.state is TableState.DROPPED:
                    raise not_copyable_error(current)
                if current.state is TableState.NEEDS_RESYNC:
                    now = published_schema(conn, current.oid, source.publication.name)
                    current = schema_from_catalog(current, now, epoch)
                return complete_table_chunk(with_state(current, TableState.LIVE))

            build(chosen)  # raises before a window is opened
            stream.place_chunk(chosen.relation, build)

    def _reread(self) -> str | None:
        """Load the table rules of the definition again; return the message of the error, or None without an error."""
        try:
            self._definition = self._definition.with_rules_of(self._reload())
        except CdcError as exc:
            if exc.message != self._unread:
                log.warning(
                    "cannot load the changed definition; the reader keeps the previous table rules",
                    message=exc.message,
                )
            self._unread = exc.message
        else:
            self._unread = None
        return self._unread

    def _capturable(self, added: Mapping[int, TableName]) -> tuple[dict[int, TableName], dict[str, str]]:
        """Return the tables that can be captured, by OID, and the reasons why the others cannot, by name."""
        names = list(map(str, added.values()))
        wrong = table_problems(self._definition, names) if names else {}
        fit = {oid: name for oid, name in added.items() if str(name) not in wrong}
        return fit, {str(name): _refusal_text(name, *wrong[str(name)]) for oid, name in added.items() if oid not in fit}

    def _log_refused(self, refused: Mapping[str, str]) -> Mapping[str, str]:
        """Write a log message for each newly refused table, and return all refused tables."""
        for name, reason in refused.items():
            if self._refused.get(name) != reason:
                log.warning("a table rule matches a table that cannot be captured", table=name, reason=reason)
        self._refused = refused
        return refused

    def _add(self, conn: Any, primary: Any, stream: ChunkSender, added: Mapping[int, TableName]) -> tuple[str, ...]:
        source, added_topics = self._definition.source, []
        if added:
            control = publication_control(self._definition)
            ensure_publication(primary, source.publication.name, list(added.values()), control=control)
        for oid, name in added.items():
            relation = stream.durable_position.epoch << EPOCH_SHIFT | oid
            schema = published_schema(conn, oid, source.publication.name, relation)
            if schema is None:
                continue
            if self._definition.snapshot.mode is SnapshotMode.NO_DATA:
                stream.place_chunk(relation, lambda _, schema=schema: complete_table_chunk(schema))  # type: ignore[misc]
            else:
                begun = schema.flagged(TableState.SNAPSHOTTING, ADDED)
                stream.place_chunk(relation, lambda _, begun=begun: schema_chunk(begun))  # type: ignore[misc]
            log.info("added a table to the publication", table=str(name))
            added_topics.append(str(name))
        return tuple(added_topics)

    def _remove(self, primary: Any, stream: ChunkSender, schema: TableSchema, present: TableName) -> None:
        """End the capture of a table. present: its name at the source; another table may have the name of `schema`."""
        name = self._definition.source.publication.name
        publication = read_publication(primary, name)
        if publication is not None and publication.is_alterable(publication_control(self._definition)):
            drop_table(primary, name, present)
        self._mark(stream, schema, REMOVED)

    def _mark(self, stream: ChunkSender, schema: TableSchema, reason: str) -> None:
        """Write a schema row (`s`) with state `dropped` and a reason; the row ends the capture of the table."""
        stream.place_chunk(
            schema.relation, lambda version: schema_chunk((version or schema).flagged(TableState.DROPPED, reason))
        )
        log.info("stopped capturing a table", table=schema.topic, reason=reason)


def _refusal_text(table: TableName, message: str, statement: str | None) -> str:
    """Format the reason and the remedy for a refused table as one text."""
    step = statement or complete_remedy("exclude the table: 'cdc tables remove TABLE'", topic=str(table))
    return f"{PreflightFailed.code} {message} → {step}"


def table_problems(definition: Definition, names: list[str]) -> dict[str, tuple[str, str | None]]:
    """Return the preflight problems of tables: name → (message, SQL that solves the problem or None).

    If the check reports a problem of the publication, each table is checked alone to find the cause.
    """
    source = definition.source
    wants = SourceRequirements(
        source.slot.name,
        source.publication.name,
        [escape(name) for name in names],
        control=publication_control(definition),
    )
    wrong: dict[str, tuple[str, str | None]] = {}
    for problem in preflight(source.current_primary(), wants):
        if problem.fatal:
            message, statement = wrong.get(problem.subject, ("", None))
            message = f"{message}; {problem.message}".removeprefix("; ")
            wrong[problem.subject] = message, " ".join(filter(None, (statement, problem.sql))) or None
    publication = f"publication {source.publication.name}"
    if publication not in wrong:
        return wrong
    if len(names) == 1:
        message, statement = wrong[publication]
        return {names[0]: (f"{publication} {message}", statement)} | wrong
    return {subject: reason for name in names for subject, reason in table_problems(definition, [name]).items()}


def publication_control(definition: Definition) -> PublicationControl:
    """Return the permissions of the pipeline on its publication, as the definition sets them."""
    publication = definition.source.publication
    return PublicationControl(definition.name, create=publication.create, alter=publication.alter)


def duplicate_topics(versions: Iterable[TableSchema]) -> set[str]:
    """Return the topics that several captured tables share; dropped tables do not count."""
    counted = Counter(schema.topic for schema in versions if schema.state is not TableState.DROPPED)
    return {topic for topic, count in counted.items() if count > 1}


class PublicationSyncWorker(Thread):
    """Thread that runs the publication sync periodically, and the commands CHECK_TABLES and SKIP_TABLES.

    The thread waits while source or catalog are unreachable.
    """

    def __init__(self, sync: PublicationSync, link: ReaderLink, pipeline: str, url: str) -> None:
        """`url` is the URL of the catalog."""
        super().__init__(name="tables", daemon=True)
        self._sync, self._pipeline, self._url = sync, pipeline, url
        self._windows, self._stop_event = link.windows, link.stop
        self._synced_at = float("-inf")

    def run(self) -> None:
        """Run the publication sync and the commands about tables until the reader stops."""
        while not self._stop_event.wait(POLL):
            try:
                with Catalog.open(self._url) as catalog:
                    while not self._stop_event.wait(POLL):
                        self._sync_if_due(catalog)
                        self._skip(catalog)
            except CatalogUnavailable as exc:
                log.warning(
                    "cannot read table requests from the catalog; the reader tries again",
                    code=exc.code,
                    message=exc.message,
                    fix=exc.fix,
                )

    def _sync_if_due(self, catalog: Catalog) -> None:
        """Run the publication sync if it is due or a command requests it."""
        requested = catalog.commands.pending(self._pipeline, CHECK_TABLES)
        pause = SYNC_EVERY_DUPLICATE if duplicate_topics(self._windows.schemas()) else SYNC_EVERY
        if not requested and time.monotonic() < self._synced_at + pause:
            return
        self._synced_at = time.monotonic()

        def sync() -> Mapping[str, Any] | None:
            found = self._sync.run_once()
            if found is None:
                return None
            catalog.tables.record_refused(self._pipeline, found.refused)
            return found.to_json()

        self._run_command(catalog, requested, sync)

    def _skip(self, catalog: Catalog) -> None:
        for command in catalog.commands.pending(self._pipeline, SKIP_TABLES):

            def skip(tables: list[str] = command.payload["tables"]) -> Mapping[str, Any] | None:
                versions = self._windows.schemas()
                chosen = [s for s in versions if matches(s.topic, tables) and s.state is not TableState.DROPPED]
                check_not_copying(catalog, self._pipeline, [schema.topic for schema in chosen])
                for schema in chosen:
                    self._sync.skip(schema)
                return {"skipped": [schema.topic for schema in chosen]} if versions else None

            self._run_command(catalog, [command], skip)

    def _run_command(
        self, catalog: Catalog, commands: list[Command], work: Callable[[], Mapping[str, Any] | None]
    ) -> None:
        """Call `work`, and record its result or error in the commands.

        The commands stay pending if `work` returns None or raises a temporary error.
        """
        try:
            result, done = work(), True
        except CatalogUnavailable:
            raise
        except CdcError as exc:
            is_temporary = exc.reaction is Reaction.RETRY
            event = (
                "cannot add, remove or skip tables now; the reader tries again"
                if is_temporary
                else "cannot add, remove or skip tables; a command that requested this fails"
            )
            log.warning(event, code=exc.code, message=exc.message, fix=exc.fix)
            if is_temporary:
                return
            result, done = {"error": exc.to_json()}, False
        if result is not None:
            for command in commands:
                catalog.commands.finish(command.id, result, ok=done)
