"""Backfill: copies rows of tables in chunks into the stream while the reader runs.

A backfill covers a key range, a key list, the rows that match a condition, or the whole table, for all sinks or for
one. A listed key without a row becomes a deletion.

A **full copy** (the first copy or a resync) writes three things to the log: a schema row (`s`), all rows of the table,
and an end row (`g`). At the end row, targets delete all rows that are older than the copy, because the source no longer
has them.

Progress is recorded when rows are durable in the log. A restarted reader reads only the chunks that are not durable; a
key list starts again from its beginning.

While executors are offered, they read the chunks of a table that is read by blocks (see `executor_chunks.py`).
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
from cdc.postgres.backfill_selection import check_keys, check_predicate
from cdc.postgres.chunk_queries import KeyBounds, estimate_rows, stored_tables, table_sizes
from cdc.postgres.publication import published_schema, wait_for_older_transactions
from cdc.snapshot.backfill_documents import BackfillRequest, BackfillState, TableBackfillState
from cdc.snapshot.chunk_copier import ChunkCopier, CopyContext, CopyStopped
from cdc.snapshot.chunk_plan import BlockPlan, ChunkLimits, ChunkPlan, ChunkResult, KeyListPlan, KeyRangePlan
from cdc.snapshot.chunk_sender import (
    end_of_copy_chunk,
    end_of_first_copy_chunk,
    schema_chunk,
    schema_from_catalog,
    with_state,
)
from cdc.snapshot.executor_exchange import ExecutorReads, ExecutorsChanged, executor_limits
from cdc.snapshot.missing_base_rows import keys_without_base, moved_keys_without_base
from cdc.snapshot.watermark_window import Chunk
from cdc.table import ADDED, CAPTURED, TableSchema, TableState
from cdc.thread_priority import lower_thread_priority

CHECK_EVERY: Final = 0.3
"""Seconds between two checks for commands that pause or cancel a backfill."""
NICE_INCREMENT: Final = 10
"""Amount by which the nice value of copying threads is increased."""


OLDER_TRANSACTIONS_WITHIN: Final = 10.0
"""Maximum seconds to wait for the end of transactions that began before a table was added to the publication.

Postgres does not send their earlier changes of the table. If one of these transactions is still open after this time,
the copy is tried again later.
"""


class BackfillDirective(Enum):
    """Instruction from the worker to a running backfill."""

    CONTINUE = auto()
    PAUSE = auto()
    END = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillControl:
    """Callbacks through which a backfill gets directives and reports progress."""

    directive: Callable[[], BackfillDirective]
    """Returns the current directive; only the thread that called `Backfill.run` calls it."""
    record: Callable[[BackfillState], None]
    """Saves the progress; only the thread that called `Backfill.run` calls it."""
    count: Callable[[str, int], None]
    """Adds a number of durable rows to the count of a topic; any thread may call it."""


class Backfill:
    """Carries out one backfill request."""

    def __init__(
        self,
        request: BackfillRequest,
        progress: BackfillState,
        conns: Sequence[Any],
        context: CopyContext,
        control: BackfillControl,
    ) -> None:
        """`conns` are one or more connections for reading, in autocommit mode.

        The first connection also queries the system catalogs of Postgres.
        """
        self._request, self._progress, self._conns = request, progress, conns
        self._context, self._control = context, control
        self._lock, self._changed = Lock(), Event()
        self._recorded: dict[str, Any] = {}
        self._budget, self._unrecorded = context.new_budget(), 0
        self._executor_tasks = 0
        """Number of tasks at a time by which executors read the present table; 0 if the reader reads it."""

    def run(self, tables: list[TableSchema]) -> None:
        """Copy all tables that are not yet complete, the largest first.

        A later call with the same progress continues the backfill. Raises CopyStopped if the backfill must end,
        SnapshotInvalidated if it must be retried, and ConfigError if an operator must act. Errors of the source are
        raised unchanged.
        """
        for schema in tables:
            if self._request.where is not None:
                check_predicate(self._conns[0], schema, self._request.where)
            if self._request.keys is not None:
                check_keys(self._conns[0], schema, self._request.keys)
            self._progress.tables.setdefault(schema.topic, TableBackfillState())
        failures: list[CdcError] = []
        sizes = table_sizes(self._conns[0], [schema.oid for schema in tables])
        for schema in sorted(tables, key=lambda schema: -sizes[schema.oid]):
            done = self._progress.tables[schema.topic]
            try:
                if done.state != "done":
                    self._copy_table(schema, done)
            except CdcError as exc:  # concerns this table only; the others continue
                if exc.reaction is Reaction.RETRY:
                    raise
                done.state = "failed"
                failures.append(exc)
        if failures:
            raise failures[0]
        self._progress.state = "done"
        self._record()

    def _copy_table(self, schema: TableSchema, done: TableBackfillState) -> None:
        self._wait_while_paused()
        if done.began is not None and not self._can_continue_copy(schema, Position(done.began)):
            self._progress.tables[schema.topic] = done = TableBackfillState()
        if done.began is not None and schema.state is TableState.LIVE:  # the copy ended, but that was not recorded
            done.state = "done"
            return
        done.state, done.estimate = "snapshotting", estimate_rows(self._conns[0], schema.oid)
        self._record()
        if schema.key:
            self._copy_in_chunks(schema, done)
        else:
            self._copy_keyless(schema, done)
        done.state = "done"
        self._record()

    def _can_continue_copy(self, schema: TableSchema, began: Position) -> bool:
        """Return True if an interrupted full copy can continue.

        The copy must begin again if it belongs to an earlier epoch, or if the table needs a resync.
        """
        return (
            began.epoch == self._context.sender.durable_position.epoch and schema.state is not TableState.NEEDS_RESYNC
        )

    def _copy_in_chunks(self, schema: TableSchema, done: TableBackfillState) -> None:
        context, resync = self._context, self._request.resync
        if schema.reason == ADDED:
            wait_for_older_transactions(self._conns[0], OLDER_TRANSACTIONS_WITHIN)
        if resync and done.began is None:
            done.began = int(
                context.sender.place_chunk(
                    schema.relation, lambda version: self._start_of_copy_chunk(version or schema)
                ).position
            )
            self._record()
        since = done.since if done.began is None else done.began
        if since is None:
            since = done.since = int(context.sender.durable_position)
            self._record()
        self._executor_tasks = self._offered_tasks()
        plan = self._plan(schema, done)
        self._copy(schema, done, plan)
        if not isinstance(plan, KeyListPlan):
            self._read_missing_bases(schema, done, Position(since), moved=isinstance(plan, KeyRangePlan))
        if self._request.completes and self._request.epoch == context.sender.durable_position.epoch:
            self._wait_while_paused()
            context.sender.place_chunk(schema.relation, lambda version: end_of_first_copy_chunk(version or schema))
        if done.began is not None:
            began = Position(done.began)
            self._wait_while_paused()
            context.sender.place_chunk(schema.relation, lambda version: end_of_copy_chunk(version or schema, began))

    def _read_missing_bases(
        self, schema: TableSchema, done: TableBackfillState, since: Position, *, moved: bool
    ) -> None:
        """Read the base rows of partial images that the log received after `since`; chunks may have missed these rows.

        If `moved` is true, read only rows whose key an update changed. During the read, updates can change the keys of
        the rows. The method then reads the rows under their new keys, and repeats this until no key has changed.
        """
        stream, log, after = self._context.sender, self._context.log, since
        upto = stream.durable_position
        bare = keys_without_base(log, schema.relation, after, upto, moved=moved)
        while bare:
            self._wait_while_paused()  # a pause may have arrived with the last chunk
            self._copy(schema, done, KeyListPlan(bare))
            after, upto = upto, stream.durable_position
            bare = moved_keys_without_base(log, schema.relation, after, upto, bare)

    def _plan(self, schema: TableSchema, done: TableBackfillState) -> ChunkPlan:
        request, limits = self._request, self._context.limits
        if request.keys is not None:
            done.rows, done.seconds = 0, 0.0  # a key list starts again
            return KeyListPlan(request.keys, delete_missing=True)
        if request.where is None and request.first is None and request.last is None:
            stored = stored_tables(self._conns[0], schema.oid)
            if stored is not None:
                return BlockPlan(done, stored, self._block_limits())
        return KeyRangePlan(done, KeyBounds(first=request.first, last=request.last, where=request.where), limits)

    def _offered_tasks(self) -> int:
        """Return the number of tasks at a time by which executors may read; 0 if the reader must read.

        Executors write rows for all sinks, so they do not read for a single one.
        """
        return self._context.executors.slots if self._request.sink is None else 0

    def _waiting_tasks(self, tasks: int) -> int:
        """Return how many tasks wait in the catalog while executors read `tasks` chunks.

        An executor that has read a chunk then need not wait until the reader gets the result and posts another task,
        which takes as long as the chunk of a small table. Under a limit of the source's load there is nothing to gain,
        and waiting tasks would be read all at once before the limit counts them.
        """
        is_limited = self._request.rate is not None or self._context.rate_limit.bytes_per_second is not None
        return 0 if is_limited else tasks

    def _block_limits(self) -> ChunkLimits:
        if not self._executor_tasks:
            return self._context.limits
        return executor_limits(self._executor_tasks, self._request.rate, self._context.rate_limit.bytes_per_second)

    def _start_of_copy_chunk(self, version: TableSchema) -> Chunk:
        """Return the chunk that begins a full copy: one row, which contains the current schema version.

        If the table needs a resync, the version comes from the system catalogs of Postgres.
        """
        if version.state not in CAPTURED:
            now = published_schema(self._conns[0], version.oid, self._context.publication)
            version = schema_from_catalog(version, now, self._context.sender.durable_position.epoch)
        return schema_chunk(with_state(version, TableState.SNAPSHOTTING))

    def _copy_keyless(self, schema: TableSchema, done: TableBackfillState) -> None:
        """Replace all rows of a table without a key by the rows of one snapshot, in one transaction of the log."""
        epoch = self._context.sender.durable_position.epoch
        reader = self._chunk_copier(schema, 0)
        placed = reader.copy_keyless(
            lambda version, now: with_state(schema_from_catalog(version, now, epoch), TableState.LIVE)
        )
        done.rows = placed.rows
        self._control.count(schema.topic, placed.rows)

    def _copy(self, schema: TableSchema, done: TableBackfillState, plan: ChunkPlan) -> None:
        """Copy all chunks of a plan over all connections, or over one if the plan is not parallel.

        Chunks of block ranges are read by executors, if there are any. Raises ExecutorsChanged if their number changes.
        """
        began = time.monotonic() - done.seconds

        def on_durable(read: ChunkResult, rows: int) -> None:
            with self._lock:
                self._unrecorded += 1
                plan.mark_durable(read)
                done.rows += rows
                done.seconds = time.monotonic() - began
            self._control.count(schema.topic, rows)
            self._changed.set()

        tasks = self._executor_tasks if isinstance(plan, BlockPlan) else 0
        self._budget, self._unrecorded = self._context.new_budget(tasks and tasks + self._waiting_tasks(tasks)), 0
        if tasks:
            readers = [self._executor_copier(schema, n) for n in range(tasks + self._waiting_tasks(tasks))]
        else:
            readers = [self._chunk_copier(schema, n) for n in range(len(self._conns) if plan.parallel else 1)]
        try:
            # low priority: the stream's threads process changes and these rows, and must not wait for this pool
            with ThreadPoolExecutor(len(readers), "copy", lower_thread_priority, (NICE_INCREMENT,)) as pool:
                running = {pool.submit(reader.copy, plan, self._budget, on_durable) for reader in readers}
                try:
                    self._oversee(running, tasks if isinstance(plan, BlockPlan) else None)
                finally:
                    self._context.gate.close()
                    _cancel_queries(readers, running)
        finally:
            self._context.gate.reset()
            self._record()

    def _oversee(self, running: set[Future[None]], tasks: int | None) -> None:
        """Record durable chunks, and carry out requests to pause or cancel, until all chunk copiers have ended.

        Raises ExecutorsChanged if executors may read the chunks, and no longer offer this number of tasks.
        """
        for future in running:
            future.add_done_callback(lambda _: self._changed.set())
        checked = time.monotonic()
        while running:
            self._changed.wait(CHECK_EVERY)
            self._changed.clear()
            self._record()
            if time.monotonic() - checked >= CHECK_EVERY:
                self._apply_directive()
                if tasks is not None and tasks != self._offered_tasks():
                    raise ExecutorsChanged
                checked = time.monotonic()
            for future in [future for future in running if future.done()]:
                running.discard(future)
                future.result()

    def _chunk_copier(self, schema: TableSchema, number: int) -> ChunkCopier:
        return ChunkCopier(self._conns[number], self._context, schema.relation, self._request.sink)

    def _executor_copier(self, schema: TableSchema, number: int) -> ChunkCopier:
        context = self._context
        reads = ExecutorReads(
            tasks=context.executors,
            publication=context.publication,
            server=context.server,
            limits=self._block_limits(),
        )
        return ChunkCopier(self._conns[number % len(self._conns)], context, schema.relation, None, reads)

    def _wait_while_paused(self) -> None:
        """Wait while the backfill is paused; raise CopyStopped if it must end."""
        while not self._apply_directive():
            self._context.stop.wait(CHECK_EVERY)

    def _apply_directive(self) -> bool:
        """Apply the current directive, and return True if chunks may be read now.

        Raises CopyStopped if the backfill must end.
        """
        directive = self._control.directive()
        if directive is BackfillDirective.END:
            raise CopyStopped
        reason = self._context.rate_limit.pause_reason()
        self._progress.state = "paused" if directive is BackfillDirective.PAUSE else "snapshotting"
        self._progress.reason = reason
        may_read = directive is BackfillDirective.CONTINUE and reason is None
        self._context.gate.set(is_open=may_read)
        self._record()
        return may_read

    def _record(self) -> None:
        with self._lock:
            document, count, self._unrecorded = self._progress.to_json(), self._unrecorded, 0
        if document != self._recorded:
            self._control.record(self._progress)
            self._recorded = document
        self._budget.release(count)  # only now: chunks that are not recorded are read again after a crash


def _cancel_queries(readers: Sequence[ChunkCopier], running: set[Future[None]]) -> None:
    """Cancel the running queries of the copy repeatedly, until all chunk copiers have ended."""
    while wait(running, CHECK_EVERY).not_done:
        for reader in readers:
            reader.cancel_query()
