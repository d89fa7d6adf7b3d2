"""What an epoch begins with: one commit of the log that names every table and has the rows of the small ones.

One REPEATABLE READ transaction under the slot's exported snapshot reads them; they stand at the slot's consistent
point − 1, because the next transaction's commit record can lie at the consistent point itself. A slot without that
commit is worthless: it is replaced if it is proven to be this log's (see slot_claim), and stops the copy otherwise.
Large tables are only marked here: they are copied in chunks beside the stream. Where the reader may not create the
slot, no snapshot belongs to it: then the log begins at the adopted slot, and every table is copied in chunks.
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
from cdc.config.definition import Snapshot, SnapshotMode, Undecodable
from cdc.errors import LogFenced, PreflightFailed, UnreadableRow
from cdc.failpoint import hit
from cdc.log.layout import CommitInfo, Lineage
from cdc.log.object_path import Root
from cdc.log.pending_epoch import read_pending_epoch, remove_pending_epoch
from cdc.log.reader import LogReader
from cdc.log.slot_record import write_slot_record
from cdc.log.writer import LogWriter, StagedFile
from cdc.lsn import Lsn
from cdc.metrics import SNAPSHOT_ROWS, Metrics
from cdc.pgoutput.copy_decoder import CopyDecoder, Lines
from cdc.position import Position
from cdc.postgres.chunk_snapshot import table_sizes
from cdc.postgres.connection import connect
from cdc.postgres.copy import begin_snapshot, lock_tables
from cdc.postgres.publication import PublicationControl, ensure_publication
from cdc.postgres.publication_columns import published_rows, published_schemas
from cdc.postgres.replication import SystemIdentity, identify_system
from cdc.postgres.slot import ExportedSnapshot, SlotStatus, copy_lock, create_recorded_slot, drop_slot, slot_status
from cdc.postgres.source_identity import read_source_state
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import match_tables
from cdc.postgres.text_repair import copy_text_repair
from cdc.table import TableSchema, TableState

STAGE_BYTES: Final = 64 * 1024 * 1024
"""Rows in memory before they go to a data file."""
AT_ONCE: Final = 64
"""How many times the largest table that is copied at once all of those may have, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource:
    """What to copy and from where."""

    pipeline: str
    dsn: str
    slot: str
    publication: str
    patterns: Sequence[str]
    exclude: Sequence[str]
    control: PublicationControl = field(default_factory=PublicationControl)
    """What may be done with the publication."""
    create_slot: bool = True
    """Whether a copy may create the slot, and drop it if it is proven to be the log's own."""
    failover: bool = False
    """Whether standbys shall follow the slot; from version 17."""
    undecodable: Undecodable = Undecodable.FAIL
    """What becomes of text that is not UTF-8."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    """What is copied, and which tables beside the stream."""


@dataclass(frozen=True, slots=True)
class CopySummary:
    """What the first commit of an epoch contains."""

    position: Position
    tables: int
    rows: int
    later: int
    """Tables that are copied while the stream runs."""


def ensure_initial_snapshot(source: CopySource, root: Root, writer: LogWriter, figures: Metrics) -> CopySummary | None:
    """Make the log one that can be streamed into: copy if it is empty, or if a new epoch was asked for and not begun.

    Returns what was copied, None if nothing had to be.

    Killed anywhere, it can be called again: an epoch begins with one commit. Raises SlotInUse while another
    reader copies from or streams from the same source, SlotBlocked, PreflightFailed, and UnexpectedSlot,
    SlotNotOwned or SlotNotCreated for a slot that the copy may not replace.
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
    """Make publication and slot, copy every table, commit; returns what was copied.

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
        beginning = _StartingSlot(source, SlotClaim.of(root, writer), identify_system(source.dsn))
        adopted = beginning.check(conn)
        ensure_publication(conn, source.publication, [name for _, name in tables], control=source.control)
        with ExitStack() as opened:
            point = adopted
            reading = opened.enter_context(connect(source.dsn, autocommit=False))
            if point is None:
                snapshot = opened.enter_context(beginning.create(conn))
                begin_snapshot(reading, snapshot.name)
                point = snapshot.consistent_point
            lock_tables(reading, tables)
            schemas = list(published_schemas(reading, [oid for oid, _ in tables], source.publication).values())
            plan = continue_relations(past, schemas, {str(name) for _, name in match_tables(reading, ["*"])})
            position = Position.of(point - 1, past.epoch)
            copy = _SnapshotCommit(source, writer, figures, position)
            later = _tables_for_chunks(reading, plan.copied, source.snapshot)
            if adopted is not None:
                later = {schema.relation for schema in plan.copied}
            _copy_tables(copy, plan, later, reading)
            state = read_source_state(source.dsn, source.slot, source.publication, ())
            copy.commit(lineage_of(state))
    return copy.summary(later)


def _try_copy_table(reading: Any, copy: _SnapshotCommit, schema: TableSchema, chunks: Iterator[Lines]) -> bool:
    """Copy one table; false if the server cannot send a row of it: its copy beside the stream fails alone, and says so.

    The rows that came are true, and stay.
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
    """Take every table of the plan into the copy; `later` are the relations that are only marked."""
    source = copy.source
    mend, rows_of = copy_text_repair(source.dsn, source.undecodable), published_rows(reading, source.publication)
    for schema in plan.copied:
        if source.snapshot.mode is SnapshotMode.NO_DATA:
            copy.mark(schema, ended=True)
        elif schema.relation in later or not _try_copy_table(reading, copy, schema, map(mend(schema), rows_of(schema))):
            copy.mark(replace(schema, state=TableState.SNAPSHOTTING))
    for schema in plan.gone:
        copy.mark(schema, ended=True)
    for schema in plan.left:
        copy.mark(schema)


@dataclass(frozen=True, slots=True)
class _StartingSlot:
    """The slot that a copy begins at; for a caller with the exclusive right to it."""

    source: CopySource
    claim: SlotClaim
    identity: SystemIdentity

    def check(self, conn: Any) -> Lsn | None:
        """Raise the error that says why the copy cannot begin; the position of an adopted slot, None for a new one."""
        slot = slot_status(conn, self.source.slot)
        if not self.source.create_slot:
            return check_adopted(slot, self.source.slot, self.claim, self.identity).confirmed_flush
        if slot is not None:
            check_replaceable(slot, self.claim, self.identity)
        return None

    def create(self, conn: Any) -> AbstractContextManager[ExportedSnapshot]:
        """Create the slot, in the place of one that is proven to be the log's own."""
        return create_recorded_slot(
            conn,
            self.source.dsn,
            self.source.slot,
            lambda made: self._replace(conn, made),
            failover=self.source.failover,
        )

    def _replace(self, conn: Any, made: SlotStatus) -> None:
        """Drop the slot of before, as late as possible, and record the one that will be created."""
        slot = slot_status(conn, self.source.slot)
        if slot is not None:
            check_replaceable(slot, self.claim, self.identity)
            drop_slot(conn, slot.name, confirmed=slot.confirmed_flush)
            hit("slot_dropped")
        write_slot_record(self.claim.root, self.claim.record_of(made, self.identity))


def _tables_for_chunks(conn: Any, tables: Sequence[TableSchema], snapshot: Snapshot) -> set[int]:
    """Relations whose rows wait for the stream: large ones with a key, and others when there are too many of them."""
    relations = {schema.oid: schema.relation for schema in tables if schema.key}
    later, total = set[int](), 0
    for oid, size in sorted(table_sizes(conn, list(relations)).items(), key=itemgetter(1)):
        total += size
        if size > snapshot.beside or total > AT_ONCE * snapshot.beside:
            later.add(relations[oid])
    return later


class _SnapshotCommit:
    """One copy on its way to one commit."""

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
        """Take one table: its schema row, then its rows."""
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
        """Tell the state of a table that is not copied here; with ended, all of its rows from before go."""
        self._add(self._control(schema, Operation.SCHEMA, schema.to_json()))
        if ended:
            self._ended.append(schema)

    def commit(self, lineage: Lineage) -> None:
        """Close every generation and make the copy visible, whole."""
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
        """What was copied; later: relations that are copied beside the stream."""
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
        place = RowOrder(int(self.position), self._ordinal, 0, self._committed_at)
        return control_row(place, operation, schema.relation, schema.topic, payload)
