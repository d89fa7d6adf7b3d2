"""Initial snapshot: the first commit of an epoch, with the schema of every table and the rows of small tables.

One REPEATABLE READ transaction with the slot's exported snapshot reads the rows. Their position is the slot's
consistent point − 1, because the next commit record can be at the consistent point itself. A slot without this commit
is useless: the next start replaces it if the log can prove that it owns the slot (see slot_ownership), or fails.

Large tables are only marked here; backfills copy them in chunks while the stream runs. If the reader may not create the
slot, there is no exported snapshot. The log then begins at the adopted slot, and all tables are copied in chunks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa

from cdc.capture.epoch_tables import Continuation, EarlierTables, continue_relations
from cdc.capture.resume_checks import lineage_of
from cdc.capture.slot_ownership import SlotClaim, check_adopted, check_replaceable
from cdc.change import LOG_SCHEMA, Operation, RowOrder, control_row
from cdc.config.source import Snapshot, SnapshotMode, Undecodable
from cdc.errors import LogFenced, PreflightFailed, UnreadableRow
from cdc.failpoint import hit
from cdc.log.epoch_records import read_pending_epoch, remove_pending_epoch, write_slot_record
from cdc.log.layout import CommitInfo, CommitSource
from cdc.log.object_path import Root
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter, StagedFile
from cdc.lsn import Lsn
from cdc.metrics import SNAPSHOT_ROWS, Metrics
from cdc.pgoutput.copy_decoder import CopyDecoder, Lines
from cdc.position import Position
from cdc.postgres.chunk_snapshot import table_sizes
from cdc.postgres.connection import connect
from cdc.postgres.copy import begin_snapshot, lock_tables
from cdc.postgres.encoding import copy_text_repair
from cdc.postgres.publication import PublicationControl, ensure_publication, published_rows, published_schemas
from cdc.postgres.replication import SystemIdentity, identify_system
from cdc.postgres.slot import ExportedSnapshot, SlotStatus, copy_lock, create_recorded_slot, drop_slot, slot_status
from cdc.postgres.source_identity import read_source_state
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import match_tables
from cdc.table import TableSchema, TableState

STAGE_BYTES: Final = 64 * 1024 * 1024
"""Rows in memory before they go to a data file."""
AT_ONCE: Final = 64
"""Limit for all tables that the initial snapshot copies, as a multiple of the limit for one table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource:
    """Source database, slot, publication and tables of an initial snapshot."""

    pipeline: str
    dsn: str
    slot: str
    publication: str
    patterns: Sequence[str]
    exclude: Sequence[str]
    control: PublicationControl = field(default_factory=PublicationControl)
    """Whether the reader may create or alter the publication."""
    create_slot: bool = True
    """Whether the snapshot may create the slot, and replace one that belongs to the log."""
    failover: bool = False
    """Whether the slot is synchronized to standbys; from version 17."""
    undecodable: Undecodable = Undecodable.FAIL
    """Treatment of text that is not valid UTF-8."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    """Snapshot mode, and the size from which tables are copied in chunks."""


@dataclass(frozen=True, slots=True)
class CopySummary:
    """Contents of the first commit of an epoch."""

    position: Position
    tables: int
    rows: int
    later: int
    """Number of tables that backfills copy while the stream runs."""


def ensure_initial_snapshot(source: CopySource, root: Root, writer: LogWriter, figures: Metrics) -> CopySummary | None:
    """Take an initial snapshot if the log is empty or a requested epoch has not begun; None if neither.

    It can be called again after a crash at any point, because an epoch begins with a single commit. Raises SlotInUse
    while another reader uses the slot, SlotBlocked, PreflightFailed, and UnexpectedSlot, SlotNotOwned or SlotNotCreated
    for a slot that it may not replace.
    """
    copied = take_initial_snapshot(source, root, writer, figures, EarlierTables()) if writer.durable is None else None
    intent = read_pending_epoch(root)
    if intent is None or writer.durable is None:
        return copied
    if writer.durable.epoch < intent.epoch:
        versions = [schema for _, schema in LogReader(root).schema_history()]
        copied = take_initial_snapshot(source, root, writer, figures, EarlierTables.of(intent.epoch, versions))
    remove_pending_epoch(root)
    return copied


def take_initial_snapshot(
    source: CopySource, root: Root, writer: LogWriter, figures: Metrics, past: EarlierTables
) -> CopySummary:
    """Create publication and slot, copy the tables, and commit.

    Raises SlotInUse while another reader copies from the same source.
    """
    with connect(source.dsn, application_name="cdc snapshot") as conn, copy_lock(conn, source.slot):
        if LogReader(root).durable != writer.durable:
            raise LogFenced(f"another writer committed to the log after {writer.durable!s}")
        tables = match_tables(conn, source.patterns, source.exclude)
        if not tables:
            raise PreflightFailed(
                f"no table matches {list(source.patterns)!r}", remedy="correct 'tables' in the definition"
            )
        starting_slot = _StartingSlot(source, SlotClaim.of(root, writer), identify_system(source.dsn))
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
            commit = _SnapshotCommit(source, writer, figures, position)
            later = _tables_for_chunks(reading, plan.copied, source.snapshot)
            if adopted is not None:
                later = {schema.relation for schema in plan.copied}
            _copy_tables(commit, plan, later, reading)
            state = read_source_state(source.dsn, source.slot, source.publication, ())
            commit.commit(lineage_of(state))
    return commit.summary(later)


def _try_copy_table(reading: Any, copy: _SnapshotCommit, schema: TableSchema, chunks: Iterator[Lines]) -> bool:
    """Copy one table; returns False if the server cannot send one of its rows.

    The rows received so far are correct and stay. A backfill copies the table later, and reports the error by itself.
    """
    with map_errors():
        reading.execute("SAVEPOINT copied_so_far")
    try:
        copy.table(schema, chunks)
    except UnreadableRow:
        with map_errors():
            reading.execute("ROLLBACK TO SAVEPOINT copied_so_far")
        return False
    with map_errors():
        reading.execute("RELEASE SAVEPOINT copied_so_far")
    return True


def _copy_tables(copy: _SnapshotCommit, plan: Continuation, later: set[int], reading: Any) -> None:
    """Add every table of the plan to the commit; relations in `later` are only marked."""
    source = copy.source
    repair, rows_of = copy_text_repair(source.dsn, source.undecodable), published_rows(reading, source.publication)
    for schema in plan.copied:
        if source.snapshot.mode is SnapshotMode.NO_DATA:
            copy.mark(schema, ended=True)
        elif schema.relation in later or not _try_copy_table(
            reading, copy, schema, map(repair(schema), rows_of(schema))
        ):
            copy.mark(replace(schema, state=TableState.SNAPSHOTTING))
    for schema in plan.gone:
        copy.mark(schema, ended=True)
    for schema in plan.left:
        copy.mark(schema)


@dataclass(frozen=True, slots=True)
class _StartingSlot:
    """The slot at which an epoch begins; the caller has the exclusive lock on it."""

    source: CopySource
    claim: SlotClaim
    identity: SystemIdentity

    def check(self, conn: Any) -> Lsn | None:
        """Position of an adopted slot, None for a new slot; raises an error if the snapshot may not use the slot."""
        slot = slot_status(conn, self.source.slot)
        if not self.source.create_slot:
            return check_adopted(slot, self.source.slot, self.claim, self.identity).confirmed_flush
        if slot is not None:
            check_replaceable(slot, self.claim, self.identity)
        return None

    def create(self, conn: Any) -> AbstractContextManager[ExportedSnapshot]:
        """Create the slot; replaces an existing one that belongs to the log."""
        return create_recorded_slot(
            conn,
            self.source.dsn,
            self.source.slot,
            lambda new_slot: self._replace(conn, new_slot),
            failover=self.source.failover,
        )

    def _replace(self, conn: Any, new_slot: SlotStatus) -> None:
        """Drop the previous slot, as late as possible, and record the new one."""
        slot = slot_status(conn, self.source.slot)
        if slot is not None:
            check_replaceable(slot, self.claim, self.identity)
            drop_slot(conn, slot.name, confirmed=slot.confirmed_flush)
            hit("slot_dropped")
        write_slot_record(self.claim.root, self.claim.record_of(new_slot, self.identity))


def _tables_for_chunks(conn: Any, tables: Sequence[TableSchema], snapshot: Snapshot) -> set[int]:
    """Relations to copy in chunks: tables with a key that are large, or that exceed the total limit."""
    relations = {schema.oid: schema.relation for schema in tables if schema.key}
    later, total = set[int](), 0
    for oid, size in sorted(table_sizes(conn, list(relations)).items(), key=itemgetter(1)):
        total += size
        if size > snapshot.beside or total > AT_ONCE * snapshot.beside:
            later.add(relations[oid])
    return later


class _SnapshotCommit:
    """Collects the rows of an initial snapshot and commits them at once."""

    def __init__(self, source: CopySource, writer: LogWriter, figures: Metrics, position: Position) -> None:
        self.position = position
        self.source, self._writer, self._figures = source, writer, figures
        self._committed_at = time.time_ns() // 1000
        self._ordinal = 0
        self._rows = 0
        self._files: list[StagedFile] = []
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._ended: list[TableSchema] = []
        self._copied = self._copied_rows = 0

    def table(self, schema: TableSchema, chunks: Iterator[Lines]) -> None:
        """Add one table: its schema row, then its rows."""
        self._add(self._control(schema, Operation.SCHEMA, schema.to_json()))
        decoder = CopyDecoder(
            schema, position=self.position, xid=0, committed_at=self._committed_at, first_ordinal=self._ordinal
        )
        for chunk in chunks:
            batch = decoder.feed(chunk)
            if batch is not None:
                self._add(batch)
                self._copied_rows += batch.num_rows
                self._figures.add(SNAPSHOT_ROWS, batch.num_rows, self.source.pipeline, schema.topic)
        decoder.finish()
        self._copied += 1
        self._ended.append(schema)

    def mark(self, schema: TableSchema, *, ended: bool = False) -> None:
        """Add the schema row of a table without its rows; ended: targets delete all its earlier rows."""
        self._add(self._control(schema, Operation.SCHEMA, schema.to_json()))
        if ended:
            self._ended.append(schema)

    def commit(self, lineage: CommitSource) -> None:
        """End the generation of every copied table, and commit."""
        for schema in self._ended:
            self._add(self._control(schema, Operation.GENERATION, str(int(self.position)).encode()))
        self._stage()
        hit("after_copy_staged")
        info = CommitInfo(
            last=self.position,
            committed_at=self._committed_at,
            rows=self._rows,
            transactions=1,
            **lineage._asdict(),
        )
        self._writer.commit(self._files, info)

    def summary(self, later: set[int]) -> CopySummary:
        """Counts for the log line; later: relations that backfills copy."""
        return CopySummary(self.position, self._copied, self._copied_rows, len(later))

    def _add(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._ordinal += batch.num_rows
        self._rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= STAGE_BYTES:
            self._stage()

    def _stage(self) -> None:
        if self._waiting:
            self._files += self._writer.stage(pa.Table.from_batches(self._waiting, LOG_SCHEMA))
            self._waiting, self._waiting_bytes = [], 0

    def _control(self, schema: TableSchema, operation: Operation, payload: bytes) -> pa.RecordBatch:
        order = RowOrder(int(self.position), self._ordinal, 0, self._committed_at)
        return control_row(order, operation, schema.relation, schema.topic, payload)
