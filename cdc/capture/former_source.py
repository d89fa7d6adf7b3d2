"""Former source: reads the server that a move leaves to the end of its WAL, and checks that writers have stopped.

A marker is a message in the WAL. Once the log has a marker, it has every transaction that committed before. After the
first marker the function waits until all transactions that were open have ended. If the log then has changes of tables
between the first and the second marker, somebody still writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import pyarrow.compute as pc

from cdc.capture.operator_recovery import idle_slot
from cdc.capture.reader import Reader, ReaderContext
from cdc.capture.settings import reader_settings
from cdc.config import Definition
from cdc.errors import SlotBlocked, SourceStillWritten
from cdc.log.reader import LogReader
from cdc.log_row import HEARTBEAT_PREFIX, ROW_OPERATIONS, Operation
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.logical_messages import emit_message
from cdc.postgres.publication import wait_for_older_transactions
from cdc.postgres.replication import identify_system

OPEN_TRANSACTIONS_END: Final = 10.0
"""Default of the maximum seconds to wait until the open transactions of the former source have ended."""
_POLL: Final = 0.5
_WRITES: Final = [*sorted(operation.value for operation in ROW_OPERATIONS), Operation.TRUNCATE.value]


def read_to_end(definition: Definition, patience: float = OPEN_TRANSACTIONS_END) -> Position:
    """Read the source of the definition until the log has all of its transactions; return the durable position.

    patience: maximum seconds to wait for the end of open transactions.

    No reader may run. Raises SlotInUse while one does, and SourceStillWritten if transactions stay open or tables are
    still changed. Raises the errors of the reader if the log cannot be continued from this server.
    """
    idle_slot(definition)
    root, epoch = definition.log.root, (LogReader(definition.log.root).durable or Position(0)).epoch
    dsn = definition.source.current_dsn()
    with _reading(definition) as (context, running), connect(dsn, application_name="cdc move") as conn:

        def read_marker() -> Position:
            emit_message(conn, HEARTBEAT_PREFIX, "move")
            end = Position.of(identify_system(dsn).wal_end, epoch)
            emit_message(conn, HEARTBEAT_PREFIX, "move")  # its position is above `end`
            while not context.durable.wait(end, _POLL):
                if running.done():
                    running.result()
            return context.durable.position

        first = read_marker()
        try:
            wait_for_older_transactions(conn, patience)
        except SlotBlocked as exc:
            raise SourceStillWritten(f"transactions of the former source are still open: {exc.message}") from exc
        second = read_marker()
    changed = _changed_tables(LogReader(root), first, second)
    if changed:
        raise SourceStillWritten(f"the former source still changes {', '.join(changed)}")
    return LogReader(root).durable or second


@contextmanager
def _reading(definition: Definition) -> Iterator[tuple[ReaderContext, Future[None]]]:
    """Run a reader in a thread inside the block; an error of the reader is raised."""
    context = ReaderContext()
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as pool:
        running = pool.submit(Reader(reader_settings(definition), context).run)
        try:
            yield context, running
        finally:
            context.stop.set()
        running.result()


def _changed_tables(log: LogReader, after: Position, upto: Position) -> list[str]:
    writes = pc.field("op").isin(_WRITES)
    return sorted({topic for rows in log.rows(after, upto) for topic in rows.filter(writes)["topic"].to_pylist()})
