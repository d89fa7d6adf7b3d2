"""Initial snapshot: the first commit of an epoch, with the schema of every table and the rows of small tables.

One REPEATABLE READ transaction with the slot's exported snapshot reads the rows. Their position is the slot's
consistent point − 1, because the next commit record can be at the consistent point itself. If the process is killed
before this commit, the new slot remains unused. The next start replaces that slot if it provably belongs to the log
(see slot_belongs_to_log); otherwise the start fails.

For a large table the commit contains only the schema; backfills copy large tables in chunks while the stream runs. If
the reader may not create the slot, there is no exported snapshot. The log then begins at the adopted slot, and all
tables are copied in chunks.

Within an epoch the OID identifies a table, and the attribute number identifies a column. They can differ on a restored,
upgraded or promoted server, so a new epoch matches tables and columns by name. A table or column without a match gets
an unused number. A new epoch copies all rows again. So after a wrong match the current rows are right; only changes of
earlier epochs are assigned to a wrong table or column.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Final

import structlog

from cdc.bucket_files import Root
from cdc.capture.commit_outside_stream import SnapshotCommit
from cdc.capture.resume_checks import lineage_of
from cdc.capture.settings import SourceSettings
from cdc.capture.slot_belongs_to_log import SlotClaim, check_adopted, check_replaceable
from cdc.config.source import Snapshot
from cdc.errors import LogFenced, PreflightFailed, UnreadableRow
from cdc.failpoint import hit
from cdc.log.epoch_and_slot_records import read_pending_epoch, remove_pending_epoch, write_slot_record
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.lsn import Lsn
from cdc.metrics import SNAPSHOT_ROWS, Metrics
from cdc.pgoutput.copy_decoder import Lines
from cdc.position import Position
from cdc.postgres.chunk_queries import table_sizes
from cdc.postgres.column_identity import EPOCH_SHIFT
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import begin_snapshot, lock_tables
from cdc.postgres.publication import ensure_publication, published_rows, published_schemas
from cdc.postgres.replication import SystemIdentity, identify_system
from cdc.postgres.slot import (
    DraftSlot,
    ExportedSnapshot,
    SlotStatus,
    copy_lock,
    create_draft_slot,
    drop_slot,
    slot_status,
)
from cdc.postgres.source_state import read_source_state
from cdc.postgres.sql_ascii import copy_text_repair
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import TableName, match_tables, readable_tables
from cdc.table import UNPROVED, TableSchema, TableState

log = structlog.get_logger("reader")

TOTAL_FACTOR: Final = 64
"""Limit of the total size of the tables that the initial snapshot copies, as a multiple of the limit per table."""


@dataclass(frozen=True, slots=True)
class CopySummary:
    """Position of the first commit of an epoch, and numbers of its tables and rows."""

    position: Position
    tables: int
    rows: int
    later: int
    """Number of tables that backfills copy while the stream runs."""


@dataclass(frozen=True, slots=True)
class EarlierTables:
    """Tables of the log at the beginning of an epoch, from earlier epochs; the default values describe an empty log."""

    epoch: int = 0
    """The epoch that begins."""
    schemas: Mapping[int, TableSchema] = field(default_factory=dict)
    """Latest schema version of each relation, by relation number."""
    used: Mapping[int, int] = field(default_factory=dict)
    """Highest column id in all schema versions of each relation, by relation number."""

    @classmethod
    def of(cls, epoch: int, versions: Iterable[TableSchema]) -> EarlierTables:
        """Build the object from all schema versions of the log, oldest first."""
        schemas: dict[int, TableSchema] = {}
        used: dict[int, int] = {}
        for version in versions:
            # reinsert, so that of two tables with one name the most recent comes last
            schemas[version.relation] = version.following(schemas.pop(version.relation, None))
            used[version.relation] = max([used.get(version.relation, 0), *(c.id for c in version.columns)])
        return cls(epoch, schemas, used)


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tables that the first commit of an epoch records: captured, dropped and no longer captured tables."""

    copied: list[TableSchema]
    """Tables that are captured from now on, with their relation numbers in the log."""
    dropped: list[TableSchema]
    """Tables of the log that the source no longer has; targets delete the rows of these tables."""
    uncaptured: list[TableSchema]
    """Tables of the log that the source has but the definition no longer captures.

    Targets keep the rows of these tables, and the log marks the tables `needs_resync`.
    """


def ensure_initial_snapshot(
    source: SourceSettings, root: Root, writer: LogWriter, metrics: Metrics
) -> CopySummary | None:
    """Take an initial snapshot if the log is empty or a requested epoch has not begun; otherwise return None.

    An epoch begins with a single commit, so the function can be called again after a crash at any point.

    Raises SlotInUse while another process uses the slot, SlotBlocked if the slot cannot be created yet, PreflightFailed
    if the source is not ready. Raises UnexpectedSlot or SlotNotOwned if the existing slot may not be replaced. Raises
    SlotNotCreated if the reader may not create a slot and none was adopted.
    """
    copied = take_initial_snapshot(source, root, writer, metrics, EarlierTables()) if writer.durable is None else None
    intent = read_pending_epoch(root)
    if intent is None or writer.durable is None:
        return copied
    if writer.durable.epoch < intent.epoch:
        versions = [schema for _, schema in LogReader(root).schema_history()]
        copied = take_initial_snapshot(source, root, writer, metrics, EarlierTables.of(intent.epoch, versions))
    remove_pending_epoch(root)
    return copied


def take_initial_snapshot(
    source: SourceSettings, root: Root, writer: LogWriter, metrics: Metrics, past: EarlierTables
) -> CopySummary:
    """Create publication and slot, copy the tables, and make the first commit of the epoch.

    Raises SlotInUse while another process copies tables for the same slot.
    """
    with connect(source.dsn, application_name="cdc snapshot") as conn, copy_lock(conn, source.slot):
        if LogReader(root).durable != writer.durable:
            raise LogFenced(
                f"another process committed to the log after this process had read it at position {writer.durable!s}"
            )
        tables = _tables_to_copy(conn, source)
        starting_slot = StartingSlot(source, SlotClaim.of(root, writer), identify_system(source.dsn))
        adopted = starting_slot.check(conn)
        ensure_publication(conn, source.publication, [name for _, name in tables], control=source.control)
        with ExitStack() as opened:
            point = adopted
            reading = opened.enter_context(connect(source.dsn, autocommit=False))
            if point is None:
                snapshot = opened.enter_context(starting_slot.create(conn))
                begin_snapshot(reading, snapshot.name)
                point = snapshot.consistent_point
            lock_tables(reading, tables)
            schemas = list(published_schemas(reading, [oid for oid, _ in tables], source.publication).values())
            plan = continue_relations(past, schemas, {str(name) for _, name in match_tables(reading, ["*"])})
            position = Position.of(point - 1, past.epoch)
            commit = SnapshotCommit(
                writer, position, lambda topic, rows: metrics.add(SNAPSHOT_ROWS, rows, source.pipeline, topic)
            )
            later = _tables_for_chunks(reading, plan.copied, source.snapshot)
            if adopted is not None:
                later = {schema.relation for schema in plan.copied}
            _copy_tables(source, commit, plan, later, reading)
            state = read_source_state(source.dsn, source.slot, source.publication, ())
            commit.commit(lineage_of(state))
    return CopySummary(position, commit.tables, commit.table_rows, len(later))


def _tables_to_copy(conn: Any, source: SourceSettings) -> list[tuple[int, TableName]]:
    """Return the matched tables that the role may read.

    The publication sync refuses the others, with the reason, and adds them once the role may read them. Raises
    PreflightFailed if there is no table to copy.
    """
    matched = match_tables(conn, source.patterns, source.exclude)
    tables = readable_tables(conn, matched)
    left_out = [str(name) for oid, name in matched if (oid, name) not in tables]
    if not matched:
        raise PreflightFailed(
            f"no table of the source matches 'tables' {list(source.patterns)!r}",
            remedy="correct 'tables' in the definition",
        )
    if not tables:
        raise PreflightFailed(f"the role may read none of the tables {', '.join(left_out)}")
    if left_out:
        log.warning(
            "the initial snapshot leaves out tables that the role may not read; 'cdc doctor' names the missing rights",
            tables=left_out,
        )
    return tables


def _try_copy_table(reading: Any, copy: SnapshotCommit, schema: TableSchema, chunks: Iterator[Lines]) -> bool:
    """Copy one table; return False if the server cannot send one of its rows.

    The rows received before the error are correct and stay in the commit. A backfill later copies the table again; if
    the error occurs again, the backfill reports it.
    """
    try:
        copy.table(schema, chunks)
    except UnreadableRow:
        with map_errors():
            reading.execute("ROLLBACK TO SAVEPOINT nothing_failed")
        return False
    return True


def _copy_tables(
    source: SourceSettings, copy: SnapshotCommit, plan: Continuation, later: set[int], reading: Any
) -> None:
    """Add every table of the plan to the commit; relations in `later` get only a schema row."""
    repair, rows_of = copy_text_repair(source.dsn, source.undecodable), published_rows(reading, source.publication)
    with map_errors():  # one savepoint for all tables: the transaction only reads, so a rollback loses nothing
        reading.execute("SAVEPOINT nothing_failed")
    for schema in plan.copied:
        if not source.copies_rows:
            copy.mark(schema, ended=True)
        elif schema.relation in later or not _try_copy_table(
            reading, copy, schema, map(repair(schema), rows_of(schema))
        ):
            copy.mark(replace(schema, state=TableState.SNAPSHOTTING))
    for schema in plan.dropped:
        copy.mark(schema, ended=True)
    for schema in plan.uncaptured:
        copy.mark(schema)


@dataclass(frozen=True, slots=True)
class StartingSlot:
    """The slot at which an epoch begins; the caller has the lock that excludes other snapshots from this slot."""

    source: SourceSettings
    claim: SlotClaim
    identity: SystemIdentity

    def check(self, conn: Any) -> Lsn | None:
        """Return the LSN of the adopted slot; None if the reader creates the slot.

        Raises an error if the existing slot may not be used or replaced.
        """
        slot = slot_status(conn, self.source.slot)
        if not self.source.create_slot:
            return check_adopted(slot, self.source.slot, self.claim, self.identity).confirmed_flush
        if slot is not None:
            check_replaceable(slot, self.claim, self.identity)
        return None

    @contextmanager
    def create(self, conn: Any) -> Iterator[ExportedSnapshot]:
        """Create the slot, and yield its exported snapshot; an existing slot that belongs to the log is replaced."""
        with create_draft_slot(self.source.dsn) as draft:
            self.keep(conn, draft)
            yield draft.snapshot

    def keep(self, conn: Any, draft: DraftSlot) -> None:
        """Make the draft the slot of the log; an existing slot that belongs to the log is replaced."""
        draft.keep(conn, self.source.slot, lambda new: self._replace(conn, new), failover=self.source.failover)

    def _replace(self, conn: Any, new_slot: SlotStatus) -> None:
        """Drop the previous slot, just before the new slot is created, and write the slot record of the new slot."""
        slot = slot_status(conn, self.source.slot)
        if slot is not None:
            check_replaceable(slot, self.claim, self.identity)
            drop_slot(conn, slot.name, confirmed=slot.confirmed_flush)
            hit("slot_dropped")
        write_slot_record(self.claim.root, self.claim.record_of(new_slot, self.identity))


def _tables_for_chunks(conn: Any, tables: Sequence[TableSchema], snapshot: Snapshot) -> set[int]:
    """Return the relations to copy in chunks: those with a key, if above the limit per table or the total limit."""
    relations = {schema.oid: schema.relation for schema in tables if schema.key}
    later, total = set[int](), 0
    for oid, size in sorted(table_sizes(conn, list(relations)).items(), key=itemgetter(1)):
        total += size
        if size > snapshot.beside or total > TOTAL_FACTOR * snapshot.beside:
            later.add(relations[oid])
    return later


def continue_relations(past: EarlierTables, tables: Iterable[TableSchema], existing: Collection[str]) -> Continuation:
    """Assign relation numbers to the tables that an epoch captures; find the tables of the log that the epoch omits.

    tables: the tables to capture, from the source's system catalogs. existing: topics of all tables of the source.
    """
    latest = {schema.topic: schema for schema in past.schemas.values() if schema.state is not TableState.DROPPED}
    copied = [_numbered(past, table, latest.get(table.topic)) for table in tables]
    captured = {schema.topic for schema in copied}
    absent = [schema for topic, schema in sorted(latest.items()) if topic not in captured]
    began = f"when epoch {past.epoch} began"
    return Continuation(
        copied,
        [
            s.flagged(TableState.DROPPED, f"the source did not have the table {began}")
            for s in absent
            if s.topic not in existing
        ],
        [
            s.flagged(TableState.NEEDS_RESYNC, f"the definition did not capture the table {began}")
            for s in absent
            if s.topic in existing
        ],
    )


def _numbered(past: EarlierTables, table: TableSchema, before: TableSchema | None) -> TableSchema:
    """Return the table with the relation number and the column ids of `before`, and with all former names.

    If `before` is None, the table gets a new relation number. A column that is not in `before` gets a new id.
    """
    same = [schema for schema in past.schemas.values() if schema.oid == table.oid]
    if before is None:
        version = replace(table, relation=past.epoch << EPOCH_SHIFT | table.oid)
        return version.following(same[-1]) if same else version
    named = {column.name: column.id for column in before.columns}
    # ids below UNPROVED could be attribute numbers of another table of this name
    fresh = max(past.used.get(before.relation, 0), UNPROVED - 1) + 1
    columns = []
    for column in table.columns:
        identifier = named.get(column.name)
        if identifier is None:
            identifier, fresh = fresh, fresh + 1
        columns.append(replace(column, id=identifier))
    version = replace(table, relation=before.relation, columns=tuple(columns)).following(before)
    # in the same cluster, equal attribute numbers give the former names; in another one they may add wrong ones
    ids = {column.id: numbered.id for column, numbered in zip(table.columns, columns, strict=True)}
    pairs = {(c.id, c.name) for schema in same for c in schema.columns} | {p for s in same for p in s.former_names}
    moved = {(ids[number], name) for number, name in pairs if number in ids}
    moved -= {(column.id, column.name) for column in columns}
    return replace(version, former_names=tuple(sorted({*version.former_names, *moved})))
