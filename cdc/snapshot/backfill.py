"""Backfill: rows of a table read in chunks and placed into the stream, while it runs.

A backfill can be a range of keys, a list of them, what a predicate says, or the whole table; for every sink or for one.
Of a list it also tells which keys have no row, and those vanish from the sinks. A **full copy**, the first one or a
resync, is the whole table between an `s` row that says so and a `g`: what vanished at the source while nobody watched
vanishes from every sink. Progress is recorded once the rows are durable, so a killed reader reads again what was on its
way and no more; but a list of keys from its beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum, auto
from threading import Event, Lock
from typing import Any, Final

from cdc.errors import CdcError, Reaction
from cdc.position import Position
from cdc.postgres.chunk_snapshot import KeyBounds, estimate_rows, stored_tables, table_sizes
from cdc.postgres.connection import cancel_statement
from cdc.postgres.keys import check_keys
from cdc.postgres.publication import wait_for_older_transactions
from cdc.postgres.publication_columns import published_schema
from cdc.postgres.where_clause import check_predicate
from cdc.snapshot.backfill_state import BackfillRequest, BackfillState, TableBackfillState
from cdc.snapshot.chunk_plan import BlockPlan, ChunkPlan, ChunkResult, KeyListPlan, KeyRangePlan
from cdc.snapshot.chunk_reader import ChunkBudget, ChunkReader, CopyContext, CopyStopped
from cdc.snapshot.missing_bases import keys_without_base, moved_keys_without_base
from cdc.snapshot.schema_rows import end_of_copy_chunk, schema_chunk, schema_from_catalog, with_state
from cdc.snapshot.watermark_window import Chunk
from cdc.table import ADDED, CAPTURED, TableSchema, TableState
from cdc.thread_priority import lower_thread_priority

CHECK_EVERY: Final = 0.3
"""Seconds between two questions whether to go on; what became durable is recorded at once."""


OLDER_TRANSACTIONS_WITHIN: Final = 10.0
"""Seconds to wait for transactions that may have written a table before it was published; then it is tried again."""


class BackfillDirective(Enum):
    """What becomes of work that runs."""

    GO_ON = auto()
    PAUSE = auto()
    END = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillControl:
    """To whom a backfill answers."""

    verdict: Callable[[], BackfillDirective]
    """Asked by the thread that called run alone."""
    record: Callable[[BackfillState], None]
    """Told by that thread alone."""
    count: Callable[[str, int], None]
    """Told by any of a table and so many rows that are durable."""


class Backfill:
    """One request on its way."""

    def __init__(
        self,
        request: BackfillRequest,
        work: BackfillState,
        conns: Sequence[Any],
        around: CopyContext,
        office: BackfillControl,
    ) -> None:
        """conns: one or more for reading, in autocommit; the first is also asked about tables."""
        self._request, self._work, self._conns = request, work, conns
        self._around, self._office = around, office
        self._lock, self._news = Lock(), Event()
        self._recorded: dict[str, Any] = {}
        self._slots, self._unrecorded = ChunkBudget(around.in_hand), 0

    def run(self, tables: list[TableSchema]) -> None:
        """Read and place everything that is not done yet, the largest table first: what takes longest begins soonest.

        Raises Stopped when it is not to go on, SnapshotInvalidated and source errors that may go by themselves, and
        ConfigError for what a person has to change. Can be run again with the same work.
        """
        for schema in tables:
            if self._request.where is not None:
                check_predicate(self._conns[0], schema, self._request.where)
            if self._request.keys is not None:
                check_keys(self._conns[0], schema, self._request.keys)
            self._work.tables.setdefault(schema.topic, TableBackfillState())
        failures: list[CdcError] = []
        sizes = table_sizes(self._conns[0], [schema.oid for schema in tables])
        for schema in sorted(tables, key=lambda schema: -sizes[schema.oid]):
            done = self._work.tables[schema.topic]
            try:
                if done.state != "done":
                    self._table(schema, done)
            except CdcError as exc:  # of this table alone; the others go on
                if exc.reaction is Reaction.RETRY:
                    raise
                done.state = "failed"
                failures.append(exc)
        if failures:
            raise failures[0]
        self._work.state = "done"
        self._record()

    def _table(self, schema: TableSchema, done: TableBackfillState) -> None:
        self._go_on()
        if done.began is not None and not self._is_all_there(schema, Position(done.began)):
            self._work.tables[schema.topic] = done = TableBackfillState()
        if done.began is not None and schema.state is TableState.LIVE:  # it ended, and was not recorded
            done.state = "done"
            return
        done.state, done.estimate = "snapshotting", estimate_rows(self._conns[0], schema.oid)
        self._record()
        if schema.key:
            self._by_parts(schema, done)
        else:
            self._whole(schema, done)
        done.state = "done"
        self._record()

    def _is_all_there(self, schema: TableSchema, began: Position) -> bool:
        """Whether what a full copy has brought can be gone on from.

        Not if it is of an earlier life of the source, or if changes or rows of it are lost since.
        """
        return began.epoch == self._around.stream.durable.epoch and schema.state is not TableState.NEEDS_RESYNC

    def _by_parts(self, schema: TableSchema, done: TableBackfillState) -> None:
        around, resync = self._around, self._request.resync
        if schema.reason == ADDED:
            wait_for_older_transactions(self._conns[0], OLDER_TRANSACTIONS_WITHIN)
        if resync and done.began is None:
            done.began = int(
                around.stream.place(schema.relation, lambda version: self._beginning(version or schema)).position
            )
            self._record()
        since = done.since if done.began is None else done.began
        if since is None:
            since = done.since = int(around.stream.durable)
            self._record()
        cut = self._cut(schema, done)
        self._copy(schema, done, cut)
        if not isinstance(cut, KeyListPlan):
            self._complete(schema, done, Position(since), moved=isinstance(cut, KeyRangePlan))
        if done.began is not None:
            began = Position(done.began)
            self._go_on()
            around.stream.place(schema.relation, lambda version: end_of_copy_chunk(version or schema, began))

    def _complete(self, schema: TableSchema, done: TableBackfillState, since: Position, *, moved: bool) -> None:
        """Read once more what the parts may have passed by; a row may move to another key while that is done."""
        stream, log, after = self._around.stream, self._around.log, since
        upto = stream.durable
        bare = keys_without_base(log, schema.relation, after, upto, moved=moved)
        while bare:
            self._go_on()  # a pause may have come with the last part
            self._copy(schema, done, KeyListPlan(bare))
            after, upto = upto, stream.durable
            bare = moved_keys_without_base(log, schema.relation, after, upto, bare)

    def _cut(self, schema: TableSchema, done: TableBackfillState) -> ChunkPlan:
        request, limits = self._request, self._around.limits
        if request.keys is not None:
            done.rows, done.seconds = 0, 0.0  # a list is begun anew
            return KeyListPlan(request.keys, gone=True)
        if request.where is None and request.first is None and request.last is None:
            stored = stored_tables(self._conns[0], schema.oid)
            if stored is not None:
                return BlockPlan(done, stored, limits)
        return KeyRangePlan(done, KeyBounds(first=request.first, last=request.last, where=request.where), limits)

    def _beginning(self, version: TableSchema) -> Chunk:
        """What a full copy begins with: the version that the stream is read by, anew if that is in doubt."""
        if version.state not in CAPTURED:
            now = published_schema(self._conns[0], version.oid, self._around.publication)
            version = schema_from_catalog(version, now, self._around.stream.durable.epoch)
        return schema_chunk(with_state(version, TableState.SNAPSHOTTING))

    def _whole(self, schema: TableSchema, done: TableBackfillState) -> None:
        """A table without a key begins anew with all its rows at once."""
        epoch = self._around.stream.durable.epoch
        reader = self._chunks(schema, 0)
        placed = reader.whole(
            lambda version, now: with_state(schema_from_catalog(version, now, epoch), TableState.LIVE)
        )
        done.rows = placed.rows
        self._office.count(schema.topic, placed.rows)

    def _copy(self, schema: TableSchema, done: TableBackfillState, cut: ChunkPlan) -> None:
        """Read and place all that the cut gives out, over one connection or over all."""
        began = time.monotonic() - done.seconds

        def note(read: ChunkResult, rows: int) -> None:
            with self._lock:
                self._unrecorded += 1
                cut.durable(read)
                done.rows += rows
                done.seconds = time.monotonic() - began
            self._office.count(schema.topic, rows)
            self._news.set()

        self._slots, self._unrecorded = ChunkBudget(self._around.in_hand), 0
        readers = [self._chunks(schema, n) for n in range(len(self._conns) if cut.parallel else 1)]
        try:
            # they wait for what the stream's threads do with their rows, and whoever changes rows waits for those too
            with ThreadPoolExecutor(len(readers), thread_name_prefix="copy", initializer=lower_thread_priority) as pool:
                running = {pool.submit(reader.copy, cut, self._slots, note) for reader in readers}
                try:
                    self._oversee(running)
                finally:
                    self._around.gate.end()
                    self._cut_off(running)
        finally:
            self._around.gate.reset()
            self._record()

    def _oversee(self, running: set[Future[None]]) -> None:
        """Record what becomes durable, at once, and carry on what is said of the work, until all have ended."""
        for future in running:
            future.add_done_callback(lambda _: self._news.set())
        asked = time.monotonic()
        while running:
            self._news.wait(CHECK_EVERY)
            self._news.clear()
            self._record()
            if time.monotonic() - asked >= CHECK_EVERY:
                self._look()
                asked = time.monotonic()
            for future in [future for future in running if future.done()]:
                running.discard(future)
                future.result()

    def _cut_off(self, running: set[Future[None]]) -> None:
        """End what is read for nobody any more: by a predicate a chunk may take long."""
        while wait(running, CHECK_EVERY).not_done:
            for conn in self._conns:
                cancel_statement(conn)

    def _chunks(self, schema: TableSchema, number: int) -> ChunkReader:
        return ChunkReader(self._conns[number], self._around, schema.relation, self._request.sink)

    def _go_on(self) -> None:
        """Wait while it is paused; raises Stopped when it is to end."""
        while not self._look():
            self._around.stop.wait(CHECK_EVERY)

    def _look(self) -> bool:
        """Whether it may be read now; raises Stopped when it is to end."""
        verdict = self._office.verdict()
        if verdict is BackfillDirective.END:
            raise CopyStopped
        reason = self._around.pace.holds()
        self._work.state = "paused" if verdict is BackfillDirective.PAUSE else "snapshotting"
        self._work.reason = reason
        may = verdict is BackfillDirective.GO_ON and reason is None
        self._around.gate.set(is_open=may)
        self._record()
        return may

    def _record(self) -> None:
        with self._lock:
            said, count, self._unrecorded = self._work.to_json(), self._unrecorded, 0
        if said != self._recorded:
            self._office.record(self._work)
            self._recorded = said
        self._slots.give_back(count)  # no sooner: what is not recorded is read again after a crash
