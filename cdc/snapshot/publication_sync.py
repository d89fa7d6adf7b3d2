"""Publication sync: keeps publication and log in agreement with the table rules of the definition.

A table that a rule newly matches is added to the publication and the log, and then copied. A table that no rule matches
any more is removed from the publication and marked in the log. Other tables do not change. A table that cannot be
published, or whose capture would break writes at the source, is refused with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from glob import escape
from threading import Event
from typing import Any, Final

import structlog

from cdc.config import Definition
from cdc.config.source import SnapshotMode
from cdc.errors import CdcError, PreflightFailed, complete_remedy
from cdc.position import Position
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
from cdc.snapshot.chunk_sender import ChunkSender
from cdc.snapshot.schema_rows import schema_chunk, schema_from_catalog, with_state
from cdc.snapshot.watermark_window import WatermarkWindows
from cdc.table import ADDED, REMOVED, TableSchema, TableState

SYNC_EVERY: Final = 30.0
"""Seconds between two comparisons."""
TABLE_GONE: Final = "the table is no longer at the source"

log = structlog.get_logger("tables")


@dataclass(frozen=True, slots=True)
class TableDifference:
    """Differences between the tables that the rules match and the captured tables."""

    added: Mapping[int, TableName]
    """Tables to add, by OID."""
    removed: tuple[TableSchema, ...]
    missing: tuple[TableSchema, ...]
    """Captured tables that do not exist any more, or cannot be captured any more."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """Result of one comparison; tables by topic."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Tables that a rule matches and that cannot be captured: code, reason and SQL as one text."""
    unread: str | None = None
    """Why the definition cannot be read again; the previous rules apply then. None if it was read."""

    def to_json(self) -> dict[str, Any]:
        """The document for the catalog."""
        return asdict(self)


def compare_tables(
    known: list[TableSchema], wanted: Mapping[int, TableName], existing: Mapping[int, TableName]
) -> TableDifference:
    """Compare the captured tables with the tables that rules match, and with all existing tables."""
    captured = {schema.oid: schema for schema in known if schema.state is not TableState.DROPPED}
    added = {oid: name for oid, name in wanted.items() if oid not in captured}
    removed = tuple(s for oid, s in captured.items() if oid in existing and oid not in wanted)
    missing = tuple(s for oid, s in captured.items() if oid not in existing)
    return TableDifference(added, removed, missing)


class PublicationSync:
    """Adds and removes tables of one reader; used by one thread."""

    def __init__(
        self,
        reload: Callable[[], Definition],
        definition: Definition,
        windows: WatermarkWindows,
        stop: Event,
    ) -> None:
        """reload: reads the definition again; only changes of its table rules apply."""
        self._reload, self._definition = reload, definition
        self._windows, self._stop = windows, stop
        self._refused: Mapping[str, str] = {}
        self._unread: str | None = None

    def run_once(self) -> SyncResult | None:
        """Compare once, and add and remove tables; does nothing and returns None while no session streams."""
        unread = self._reread()
        known = self._windows.schemas()
        definition, source = self._definition, self._definition.source
        if not known:
            return None
        with closing(connect(source.current_dsn(), application_name="cdc tables")) as conn:
            wanted = dict(match_tables(conn, definition.patterns, definition.excludes))
            found = compare_tables(known, wanted, dict(match_tables(conn, ["*"])))
            gone = [schema for schema in found.missing if read_schema(conn, schema.oid) is None]
            fit, wrong = self._capturable(found.added)
            captured = {schema.oid for schema in known if schema.state is not TableState.DROPPED}
            unfit = uncapturable_tables(conn, definition.patterns, definition.excludes)
            refused = self._log_refused(
                wrong | {str(t.name): _refusal_text(t.name, t.reason, t.sql) for t in unfit if t.oid not in captured}
            )
            if not fit and not found.removed and not gone:
                return SyncResult(refused=refused, unread=unread)
            with closing(connect(source.current_primary(), application_name="cdc watermarks")) as primary:
                stream = ChunkSender(primary, self._windows, self._stop)
                # first, because a new table may have the same name
                for schema in gone:
                    self._mark(stream, schema, TABLE_GONE)
                added = self._add(conn, primary, stream, fit)
                for schema in found.removed:
                    self._remove(primary, stream, schema)
        return SyncResult(added, tuple(schema.topic for schema in found.removed), refused, unread)

    def skip(self, chosen: TableSchema) -> None:
        """Mark a table as exact without a copy; raises ConfigError if its columns cannot be identified."""
        source = self._definition.source
        with (
            closing(connect(source.current_dsn(), application_name="cdc tables")) as conn,
            closing(connect(source.current_primary(), application_name="cdc watermarks")) as primary,
        ):
            stream = ChunkSender(primary, self._windows, self._stop)
            epoch = stream.durable_position.epoch

            def build(version: TableSchema | None) -> Any:
                current = version or chosen
                if current.state is TableState.NEEDS_RESYNC:
                    now = published_schema(conn, current.oid, source.publication.name)
                    current = schema_from_catalog(current, now, epoch)
                return schema_chunk(with_state(current, TableState.LIVE), Position(0))

            build(chosen)  # raises before a window is opened
            stream.place_chunk(chosen.relation, build)

    def _reread(self) -> str | None:
        """Read the definition's table rules again; returns the error text if that fails."""
        try:
            self._definition = self._definition.with_rules_of(self._reload())
        except CdcError as exc:
            if exc.message != self._unread:
                log.warning(
                    "the changed definition cannot be loaded: the previous table rules stay in effect",
                    message=exc.message,
                )
            self._unread = exc.message
        else:
            self._unread = None
        return self._unread

    def _capturable(self, added: Mapping[int, TableName]) -> tuple[dict[int, TableName], dict[str, str]]:
        """Tables that can be captured without breaking writes at the source, and reasons for the others."""
        names = list(map(str, added.values()))
        wrong = self._problems(names) if names else {}
        fit = {oid: name for oid, name in added.items() if str(name) not in wrong}
        return fit, {str(name): _refusal_text(name, *wrong[str(name)]) for oid, name in added.items() if oid not in fit}

    def _log_refused(self, refused: Mapping[str, str]) -> Mapping[str, str]:
        """Log every newly refused table once; returns all of them."""
        for name, reason in refused.items():
            if self._refused.get(name) != reason:
                log.warning("a table that a rule matches is not captured", table=name, reason=reason)
        self._refused = refused
        return refused

    def _problems(self, names: list[str]) -> dict[str, tuple[str, str | None]]:
        """Problems of tables, with the SQL to fix each; a publication problem is attributed by checking each table."""
        source = self._definition.source
        wants = SourceRequirements(
            source.slot.name,
            source.publication.name,
            [escape(name) for name in names],
            control=publication_control(self._definition),
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
        return {subject: reason for name in names for subject, reason in self._problems([name]).items()}

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
                stream.place_chunk(relation, lambda _, schema=schema: schema_chunk(schema, Position(0)))  # type: ignore[misc]
            else:
                begun = schema.flagged(TableState.SNAPSHOTTING, ADDED)
                stream.place_chunk(relation, lambda _, begun=begun: schema_chunk(begun))  # type: ignore[misc]
            log.info("table added", table=str(name))
            added_topics.append(str(name))
        return tuple(added_topics)

    def _remove(self, primary: Any, stream: ChunkSender, schema: TableSchema) -> None:
        name = self._definition.source.publication.name
        publication = read_publication(primary, name)
        if publication is not None and publication.is_alterable(publication_control(self._definition)):
            drop_table(primary, name, TableName(schema.schema, schema.name))
        self._mark(stream, schema, REMOVED)

    def _mark(self, stream: ChunkSender, schema: TableSchema, reason: str) -> None:
        """Write an `s` row, after all rows of the table, that ends its capture."""
        stream.place_chunk(
            schema.relation, lambda version: schema_chunk((version or schema).flagged(TableState.DROPPED, reason))
        )
        log.info("table removed", table=schema.topic, reason=reason)


def _refusal_text(table: TableName, message: str, statement: str | None) -> str:
    """Reason and next step for a refused table."""
    step = statement or complete_remedy("exclude it: 'cdc tables remove TABLE'", topic=str(table))
    return f"{PreflightFailed.code} {message} → {step}"


def publication_control(definition: Definition) -> PublicationControl:
    """What the definition lets the reader do with its publication."""
    publication = definition.source.publication
    return PublicationControl(definition.name, create=publication.create, alter=publication.alter)
