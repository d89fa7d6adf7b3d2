"""Membership: which tables of the source are captured, as the definition says now; looked at every half minute.

A table that a rule has begun to match is published, told to the log and then copied like those of the first day; one
that no rule matches any longer is taken out and marked. The others are not touched. One whose capture would do harm at
the source, or that nobody may publish, is left out, and the reason told.
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
from cdc.config.definition import SnapshotMode
from cdc.errors import CdcError, PreflightFailed
from cdc.position import Position
from cdc.postgres.column_identity import EPOCH_SHIFT
from cdc.postgres.connection import connect
from cdc.postgres.preflight import SourceRequirements, preflight
from cdc.postgres.publication import PublicationControl, drop_table, ensure_publication, read_publication
from cdc.postgres.publication_columns import published_schema
from cdc.postgres.tables import TableName, match_tables, read_schema, uncapturable_tables
from cdc.remedy import complete_remedy
from cdc.snapshot.chunk_sender import ChunkSender
from cdc.snapshot.schema_rows import schema_chunk, schema_from_catalog, with_state
from cdc.snapshot.watermark_window import WatermarkWindows
from cdc.table import ADDED, REMOVED, TableSchema, TableState

SYNC_EVERY: Final = 30.0
"""Seconds between two looks."""
TABLE_GONE: Final = "the table is no longer at the source"

log = structlog.get_logger("tables")


@dataclass(frozen=True, slots=True)
class TableDifference:
    """What the definition asks for and the stream does not have, and the other way round."""

    added: Mapping[int, TableName]
    """By OID."""
    removed: tuple[TableSchema, ...]
    missing: tuple[TableSchema, ...]
    """Captured and not among those that could be: gone, or no longer such a table."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What came of one look; tables by topic."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Tables that a rule matches and that are not captured: code, reason and SQL, as processes write reasons."""
    unread: str | None = None
    """Why the definition cannot be read again, if it cannot: the rules are the old ones then."""

    def to_json(self) -> dict[str, Any]:
        """As the catalog keeps it."""
        return asdict(self)


def compare_tables(
    known: list[TableSchema], wanted: Mapping[int, TableName], existing: Mapping[int, TableName]
) -> TableDifference:
    """Compare the versions of the stream with the tables that rules match, and with all that exist."""
    captured = {schema.oid: schema for schema in known if schema.state is not TableState.DROPPED}
    added = {oid: name for oid, name in wanted.items() if oid not in captured}
    removed = tuple(s for oid, s in captured.items() if oid in existing and oid not in wanted)
    missing = tuple(s for oid, s in captured.items() if oid not in existing)
    return TableDifference(added, removed, missing)


class PublicationSync:
    """Keeps the tables of one reader; used by one thread."""

    def __init__(
        self,
        again: Callable[[], Definition],
        definition: Definition,
        placing: WatermarkWindows,
        stop: Event,
    ) -> None:
        """again: reads the definition anew; of a changed one the rules for tables count, no more."""
        self._again, self._definition = again, definition
        self._placing, self._stop = placing, stop
        self._refused: Mapping[str, str] = {}
        self._unread: str | None = None

    def look(self) -> SyncResult | None:
        """Look once, and do what has to be done; None, and nothing is done, while nothing streams."""
        unread = self._reread()
        known = self._placing.versions()
        definition, source = self._definition, self._definition.source
        if not known:
            return None
        with closing(connect(source.current_dsn(), application_name="cdc tables")) as conn:
            wanted = dict(match_tables(conn, definition.patterns, definition.excludes))
            found = compare_tables(known, wanted, dict(match_tables(conn, ["*"])))
            gone = [schema for schema in found.missing if read_schema(conn, schema.oid) is None]
            fit, wrong = self._fit(found.added)
            captured = {schema.oid for schema in known if schema.state is not TableState.DROPPED}
            unfit = uncapturable_tables(conn, definition.patterns, definition.excludes)
            refused = self._refuse(
                wrong | {str(t.name): _refusal_text(t.name, t.reason, t.sql) for t in unfit if t.oid not in captured}
            )
            if not fit and not found.removed and not gone:
                return SyncResult(refused=refused, unread=unread)
            with closing(connect(source.current_primary(), application_name="cdc watermarks")) as telling:
                stream = ChunkSender(telling, self._placing, self._stop)
                # one that was made anew under the name is copied by it: the two must not be mixed up
                for schema in gone:
                    self._mark(stream, schema, TABLE_GONE)
                added = self._add(conn, telling, stream, fit)
                for schema in found.removed:
                    self._remove(telling, stream, schema)
        return SyncResult(added, tuple(schema.topic for schema in found.removed), refused, unread)

    def skip(self, chosen: TableSchema) -> None:
        """Take a table for exact from here on, without a copy; raises ConfigError where its columns are in doubt."""
        source = self._definition.source
        with (
            closing(connect(source.current_dsn(), application_name="cdc tables")) as conn,
            closing(connect(source.current_primary(), application_name="cdc watermarks")) as telling,
        ):
            stream = ChunkSender(telling, self._placing, self._stop)
            epoch = stream.durable.epoch

            def made(version: TableSchema | None) -> Any:
                at_hand = version or chosen
                if at_hand.state is TableState.NEEDS_RESYNC:
                    now = published_schema(conn, at_hand.oid, source.publication.name)
                    at_hand = schema_from_catalog(at_hand, now, epoch)
                return schema_chunk(with_state(at_hand, TableState.LIVE), Position(0))

            made(chosen)  # what cannot be made raises before anything waits for it
            stream.place(chosen.relation, made)

    def _reread(self) -> str | None:
        """Take the rules of now; why that cannot be done, if it cannot."""
        try:
            self._definition = self._definition.with_rules_of(self._again())
        except CdcError as exc:
            if exc.message != self._unread:
                log.warning("the definition cannot be read again: its tables stay as they are", message=exc.message)
            self._unread = exc.message
        else:
            self._unread = None
        return self._unread

    def _fit(self, added: Mapping[int, TableName]) -> tuple[dict[int, TableName], dict[str, str]]:
        """Those that can be captured without harm to the source, and why the others cannot."""
        names = list(map(str, added.values()))
        wrong = self._wrong(names) if names else {}
        fit = {oid: name for oid, name in added.items() if str(name) not in wrong}
        return fit, {str(name): _refusal_text(name, *wrong[str(name)]) for oid, name in added.items() if oid not in fit}

    def _refuse(self, refused: Mapping[str, str]) -> Mapping[str, str]:
        """The tables that are refused, each logged once."""
        for name, reason in refused.items():
            if self._refused.get(name) != reason:
                log.warning("a table that a rule matches is not captured", table=name, reason=reason)
        self._refused = refused
        return refused

    def _wrong(self, names: list[str]) -> dict[str, tuple[str, str | None]]:
        """What keeps a table from being captured, and the SQL; of the publication every table is asked for itself."""
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
        return {subject: reason for name in names for subject, reason in self._wrong([name]).items()}

    def _add(self, conn: Any, telling: Any, stream: ChunkSender, added: Mapping[int, TableName]) -> tuple[str, ...]:
        source, told = self._definition.source, []
        if added:
            control = publication_control(self._definition)
            ensure_publication(telling, source.publication.name, list(added.values()), control=control)
        for oid, name in added.items():
            relation = stream.durable.epoch << EPOCH_SHIFT | oid
            schema = published_schema(conn, oid, source.publication.name, relation)
            if schema is None:
                continue
            if self._definition.snapshot.mode is SnapshotMode.NO_DATA:
                stream.place(relation, lambda _, schema=schema: schema_chunk(schema, Position(0)))  # type: ignore[misc]
            else:
                begun = schema.flagged(TableState.SNAPSHOTTING, ADDED)
                stream.place(relation, lambda _, begun=begun: schema_chunk(begun))  # type: ignore[misc]
            log.info("table added", table=str(name))
            told.append(str(name))
        return tuple(told)

    def _remove(self, telling: Any, stream: ChunkSender, schema: TableSchema) -> None:
        name = self._definition.source.publication.name
        publication = read_publication(telling, name)
        if publication is not None and publication.is_alterable(publication_control(self._definition)):
            drop_table(telling, name, TableName(schema.schema, schema.name))
        self._mark(stream, schema, REMOVED)

    def _mark(self, stream: ChunkSender, schema: TableSchema, reason: str) -> None:
        """Say that nothing more comes of the table; behind all rows that it had."""
        stream.place(
            schema.relation, lambda version: schema_chunk((version or schema).flagged(TableState.DROPPED, reason))
        )
        log.info("table removed", table=schema.topic, reason=reason)


def _refusal_text(table: TableName, message: str, statement: str | None) -> str:
    """Why a table is refused, with the next step."""
    step = statement or complete_remedy("exclude it: 'cdc tables remove TABLE'", topic=str(table))
    return f"{PreflightFailed.code} {message} → {step}"


def publication_control(definition: Definition) -> PublicationControl:
    """What the definition allows the reader to do with its publication."""
    publication = definition.source.publication
    return PublicationControl(definition.name, create=publication.create, alter=publication.alter)
