"""Membership: which tables of the source are captured, as the definition says now; looked at every half minute.

A table that a rule has begun to match is published, told to the log and then copied like those of the first day; one
that no rule matches any longer is taken out and marked. The others are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from glob import escape
from threading import Event
from typing import Any, Final

import structlog

from cdc import metrics
from cdc.config import Definition
from cdc.config.definition import SnapshotMode
from cdc.errors import CdcError, ConfigError
from cdc.position import Position
from cdc.postgres.alignment import EPOCH_SHIFT
from cdc.postgres.connection import connect
from cdc.postgres.preflight import Wants, preflight
from cdc.postgres.publication import addition_sql, ensure_publication, missing_tables, withdraw
from cdc.postgres.tables import TableName, match_tables, read_schema
from cdc.snapshot.placing import Placing
from cdc.snapshot.stream import Stream
from cdc.snapshot.versions import in_state, renewed, said
from cdc.table import ADDED, TableSchema, TableState, topic

LOOK_EVERY: Final = 30.0
"""Seconds between two looks."""
REMOVED: Final = "no rule of the definition matches it any longer"

log = structlog.get_logger("tables")


@dataclass(frozen=True, slots=True)
class Difference:
    """What the definition asks for and the stream does not have, and the other way round."""

    added: Mapping[int, TableName]
    """By OID."""
    removed: tuple[TableSchema, ...]


def difference(
    known: list[TableSchema], wanted: Mapping[int, TableName], existing: Mapping[int, TableName]
) -> Difference:
    """Compare the versions of the stream with the tables that rules match, and with all that exist."""
    captured = {schema.oid: schema for schema in known if schema.state is not TableState.DROPPED}
    added = {oid: name for oid, name in wanted.items() if oid not in captured}
    removed = tuple(s for oid, s in captured.items() if oid in existing and oid not in wanted)
    return Difference(added, removed)


class Membership:
    """Keeps the tables of one reader; used by one thread."""

    def __init__(
        self,
        again: Callable[[], Definition],
        definition: Definition,
        placing: Placing,
        figures: metrics.Figures,
        stop: Event,
    ) -> None:
        """again: reads the definition anew; of a changed one the rules for tables count, no more."""
        self._again, self._definition = again, definition
        self._placing, self._figures, self._stop = placing, figures, stop
        self._refused: dict[str, str] = {}

    def look(self) -> None:
        """Look once, and do what has to be done; nothing while nothing streams."""
        self._reread()
        known = self._placing.versions()
        definition, source = self._definition, self._definition.source
        if not known:
            return
        with closing(connect(source.current_dsn(), application_name="cdc tables")) as conn:
            wanted = dict(match_tables(conn, definition.patterns, definition.excludes))
            found = difference(known, wanted, dict(match_tables(conn, ["*"])))
            added = self._fit(found.added)
            if not added and not found.removed:
                return
            primary = source.current_dsn() if source.primary is None else source.primary.reveal()
            with closing(connect(primary, application_name="cdc watermarks")) as telling:
                stream = Stream(definition.name, telling, self._placing, self._figures, self._stop)
                self._add(conn, telling, stream, added)
                for schema in found.removed:
                    self._remove(telling, stream, schema)

    def skip(self, chosen: TableSchema) -> None:
        """Take a table for exact from here on, without a copy; raises ConfigError where its columns are in doubt."""
        source = self._definition.source
        primary = source.current_dsn() if source.primary is None else source.primary.reveal()
        with (
            closing(connect(source.current_dsn(), application_name="cdc tables")) as conn,
            closing(connect(primary, application_name="cdc watermarks")) as telling,
        ):
            stream = Stream(self._definition.name, telling, self._placing, self._figures, self._stop)
            epoch = stream.durable.epoch

            def made(version: TableSchema | None) -> Any:
                at_hand = version or chosen
                if at_hand.state is TableState.NEEDS_RESYNC:
                    now = read_schema(conn, at_hand.oid, publication=source.publication.name)
                    at_hand = renewed(at_hand, now, epoch)
                return said(in_state(at_hand, TableState.LIVE), Position(0))

            stream.place(chosen.relation, made)

    def _reread(self) -> None:
        try:
            self._definition = self._definition.with_rules_of(self._again())
        except CdcError as exc:
            log.warning("the definition cannot be read again: its tables stay as they are", message=exc.message)

    def _fit(self, added: Mapping[int, TableName]) -> dict[int, TableName]:
        """Those that can be captured without harm to the source; of the others the reason is told once."""
        if not added:
            return {}
        source = self._definition.source
        wants = Wants(source.slot.name, source.publication.name, [escape(str(name)) for name in added.values()])
        wrong: dict[str, str] = {}
        for problem in preflight(source.current_dsn(), wants):
            if problem.fatal:
                wrong.setdefault(problem.subject, f"{problem.message}; {problem.sql or ''}".rstrip("; "))
        for name in added.values():
            said_of = wrong.get(str(name))
            if said_of is not None and self._refused.get(str(name)) != said_of:
                log.warning("a table that a rule matches is not captured", table=str(name), reason=said_of)
                self._refused[str(name)] = said_of
        return {oid: name for oid, name in added.items() if str(name) not in wrong}

    def _add(self, conn: Any, telling: Any, stream: Stream, added: Mapping[int, TableName]) -> None:
        source, names = self._definition.source, list(added.values())
        lacking = missing_tables(telling, source.publication.name, names)
        if lacking and not source.publication.create:
            raise ConfigError(
                f"publication {source.publication.name!r} lacks {', '.join(map(str, lacking))}",
                remedy=addition_sql(source.publication.name, lacking),
            )
        if names:
            ensure_publication(telling, source.publication.name, names)
        for oid, name in added.items():
            relation = stream.durable.epoch << EPOCH_SHIFT | oid
            schema = read_schema(conn, oid, relation=relation, publication=source.publication.name)
            if schema is None:
                continue
            if self._definition.snapshot.mode is SnapshotMode.NO_DATA:
                stream.place(relation, lambda _, schema=schema: said(schema, Position(0)))  # type: ignore[misc]
            else:
                begun = schema.flagged(TableState.SNAPSHOTTING, ADDED)
                stream.place(relation, lambda _, begun=begun: said(begun))  # type: ignore[misc]
            log.info("table added", table=str(name))

    def _remove(self, telling: Any, stream: Stream, schema: TableSchema) -> None:
        publication = self._definition.source.publication
        if publication.create:
            withdraw(telling, publication.name, TableName(schema.schema, schema.name))
        stream.place(schema.relation, lambda version: said((version or schema).flagged(TableState.DROPPED, REMOVED)))
        log.info("table removed", table=topic(schema.schema, schema.name))
