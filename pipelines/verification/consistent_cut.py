"""A consistent cut: one position at which both the source and the sinks can be read, while changes continue.

A temporary replication slot has a consistent point c and exports a snapshot. The snapshot sees exactly the transactions
whose commit record is below c. It does not see a commit at c itself, so a sink that ends a batch at c - 1 has the same
rows. A command asks the apply process for such a batch. A heartbeat moves the log past c, so that the batch can end. If
a sink published beyond c - 1 before it read the command, it cannot go back. Then another snapshot is taken.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from cdc.catalog import Catalog
from cdc.catalog.commands import Command, CommandState
from cdc.errors import PositionNotReached, SnapshotInvalidated
from cdc.log_row import HEARTBEAT_PREFIX
from cdc.position import Position
from cdc.postgres import logical_messages
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import begin_snapshot, lock_tables
from cdc.postgres.publication import published_rows
from cdc.postgres.slot import create_slot
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import TableName, match_tables, readable_tables
from cdc.table import TableSchema
from cdc.targets.published_record import Published

ATTEMPTS: Final = 10
"""Maximum number of snapshots for one cut; another is taken if a sink has already passed the snapshot's position."""
SILENT_AFTER: Final = 10.0
"""Seconds without a report after which a process counts as stopped; a running process reports every second."""
POLL: Final = 0.05
"""Seconds between two checks whether the apply process has answered the requests for cuts."""
_WAITING: Final = "SELECT 1 FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid)) LIMIT 1"
LOCK_WITHIN: Final = 3000
"""Maximum milliseconds for which a cut waits for the lock of a table."""
PASSED: Final = "passed"
"""Reason with which the apply process refuses a request for a cut: the sink has published a later position."""


@dataclass(frozen=True, slots=True)
class KeptCutAt:
    """The kept cut of one sink. The sink keeps the cut readable until a command releases it."""

    record: Published
    handle: str
    """Identifies the kept cut in its sink; the release command contains it."""


@dataclass(frozen=True, slots=True)
class ConsistentCut:
    """The source and the sinks, readable at one position."""

    position: Position
    source: Any
    """A connection inside a transaction that sees the snapshot; for one thread."""
    sinks: Mapping[str, KeptCutAt]
    publication: str
    """The publication, which decides which columns and rows the sinks should contain."""
    rows_of: Callable[[TableSchema], Iterator[memoryview]]
    """Reads the published rows of a table in the format of COPY."""

    def lock(self, schema: TableSchema) -> None:
        """Lock a table until the cut ends. Raises SnapshotInvalidated if the snapshot does not show the table as it is
        now.
        """
        with map_errors():
            # a transaction that changes the table may stay open for hours, and the cut would keep its snapshot for it
            self.source.execute(f"SET LOCAL lock_timeout = {LOCK_WITHIN}")
        lock_tables(self.source, [(schema.oid, TableName(schema.schema, schema.name))])

    def delays_others(self) -> bool:
        """Return whether a session of the source waits for a lock of this cut. Rows must not be being read."""
        with map_errors():
            return self.source.execute(_WAITING).fetchone() is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRequest:
    """Which source tables and sinks a consistent cut contains, and how to reach them."""

    pipeline: str
    dsn: str
    sinks: Sequence[str]
    patterns: Sequence[str]
    exclude: Sequence[str]
    publication: str
    epoch: int
    timeout: float
    """Maximum seconds of all attempts together."""
    primary: str | None = None
    """DSN of the server that accepts writes; None if it is `dsn`."""
    locks_all: bool = True
    """Whether the cut locks all captured tables. Otherwise the caller locks each table before reading it, so a change
    of a table's definition does not wait for the comparison of other tables."""
    pause: Callable[[float], None] = time.sleep
    """Function that waits for a number of seconds; an exception that it raises ends the request."""


@contextmanager
def consistent_cut(catalog: Catalog, request: CutRequest) -> Iterator[ConsistentCut]:
    """Take a consistent cut that stays readable inside the `with` block.

    Raises PositionNotReached after the timeout, or if no attempt succeeded.
    """
    deadline = time.monotonic() + request.timeout
    for _ in range(ATTEMPTS):
        require_apply(catalog, request.pipeline)
        with connect(request.dsn, autocommit=False, application_name="cdc verify") as source:
            commands: dict[str, int] = {}
            try:
                cut = _attempt(catalog, request, source, commands, deadline)
                if cut is not None:
                    yield cut
                    return
            finally:
                _release(catalog, request.pipeline, commands)
    raise PositionNotReached(
        f"none of {ATTEMPTS} snapshots gave a consistent cut: each time a sink had published a later position, "
        "or a table was truncated",
        remedy="verify again when the load is lower",
    )


def require_apply(catalog: Catalog, pipeline: str) -> None:
    """Raise PositionNotReached unless the apply process has reported recently; only this process can keep a cut."""
    seen = next((p.reported_at for p in catalog.processes.ls(pipeline) if p.process == "apply"), None)
    if seen is None:
        raise PositionNotReached(
            f"the apply process of pipeline {pipeline!r} has never run", remedy="start 'cdc run', then verify again"
        )
    age = (datetime.now(UTC) - seen).total_seconds()
    if age > SILENT_AFTER:
        raise PositionNotReached(
            f"the apply process of pipeline {pipeline!r} is not running: its last report is {age:.0f} s old",
            remedy="start 'cdc run', then verify again",
        )


def _attempt(
    catalog: Catalog, request: CutRequest, source: Any, commands: dict[str, int], deadline: float
) -> ConsistentCut | None:
    """Take one snapshot, and return the cut at its position; None if another snapshot may succeed."""
    try:
        position = _request_batches(catalog, request, source, commands)
    except SnapshotInvalidated:
        return None  # a table was truncated, rewritten or renamed between snapshot and lock
    kept = _wait_for_sinks(catalog, request, commands, deadline)
    if kept is None:
        return None
    return ConsistentCut(position, source, kept, request.publication, published_rows(source, request.publication))


def _request_batches(catalog: Catalog, request: CutRequest, source: Any, commands: dict[str, int]) -> Position:
    """Open a snapshot in `source`, request that every sink ends a batch at the snapshot's position, and return this
    position.

    commands: each request is added here, by sink, as soon as it is posted.
    """
    with create_slot(request.dsn, f"cdc_verify_{uuid.uuid4().hex[:12]}", temporary=True) as exported:
        position = Position.of(exported.consistent_point - 1, request.epoch)
        # first of all, because a sink may pass the cut at any moment
        for sink in request.sinks:
            commands[sink] = catalog.commands.post(request.pipeline, "cut", {"sink": sink, "position": int(position)})
        begin_snapshot(source, exported.name)
        if request.locks_all:
            # a table that the role may not read is reported as not compared; the others are
            lock_tables(source, readable_tables(source, match_tables(source, request.patterns, request.exclude)))
    # a standby, which is read-only, sends the heartbeat of its primary
    with connect(request.primary or request.dsn, application_name="cdc verify") as conn:
        logical_messages.emit_message(conn, HEARTBEAT_PREFIX, "verify")
    return position


def _wait_for_sinks(
    catalog: Catalog, request: CutRequest, commands: Mapping[str, int], deadline: float
) -> dict[str, KeptCutAt] | None:
    """Wait until all sinks are at the cut, and return sink → its kept cut; None if a sink has already passed the cut.

    Raises PositionNotReached after the deadline, or if a sink cannot reach the cut for another reason.
    """
    while True:
        found = {sink: _finished(catalog, command) for sink, command in commands.items()}
        refused = {sink: c for sink, c in found.items() if c is not None and c.state is CommandState.FAILED}
        for sink, command in refused.items():
            reason = (command.result or {}).get("reason")
            if reason != PASSED:
                raise PositionNotReached(f"sink {sink!r} cannot end a batch at the common position: {reason}")
        if refused:
            return None
        if all(found.values()):
            return {sink: _kept(command) for sink, command in found.items() if command is not None}
        if time.monotonic() >= deadline:
            raise PositionNotReached(
                _timeout_message(catalog, request, [sink for sink, command in found.items() if command is None])
            )
        require_apply(catalog, request.pipeline)
        request.pause(POLL)


def _finished(catalog: Catalog, command: int) -> Command | None:
    found = catalog.commands.get(command)
    return found if found is not None and found.state is not CommandState.PENDING else None


def _kept(command: Command) -> KeptCutAt:
    result = command.result or {}
    return KeptCutAt(Published.from_json(json.dumps(result["record"])), str(result["handle"]))


def _timeout_message(catalog: Catalog, request: CutRequest, sinks: Sequence[str]) -> str:
    states = {
        sink.sink: f" ({sink.state}: {sink.reason})" for sink in catalog.sinks.ls(request.pipeline) if sink.reason
    }
    names = ", ".join(f"{sink!r}{states.get(sink, '')}" for sink in sinks)
    return f"these sinks did not reach the common position within {request.timeout:.0f} s: {names}"


def _release(catalog: Catalog, pipeline: str, commands: Mapping[str, int]) -> None:
    for sink, command in commands.items():
        catalog.commands.finish(command, {"reason": "abandoned"}, ok=False)  # no effect on a finished command
        found = catalog.commands.get(command)
        if found is not None and found.state is CommandState.DONE:
            handle = (found.result or {})["handle"]
            catalog.commands.post(pipeline, "release", {"sink": sink, "handle": handle})
    # repeated verifications would fill the catalog: the answer of a sink contains the record of all its tables
    catalog.commands.delete(commands.values())
