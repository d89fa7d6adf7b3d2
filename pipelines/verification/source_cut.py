"""Cut: the same instant of the source and of its sinks, while both go on.

A temporary slot's exported snapshot sees exactly the transactions whose commit record lies below its
consistent point c. A commit at c itself is not seen, so a sink that ends a batch at c − 1 holds the same rows.
The request goes to the apply process as a command; a heartbeat moves the log past c, so that the
batch ends. A sink that had published beyond c − 1 before it read the command cannot go back: then
another snapshot is taken.
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
from cdc.change import HEARTBEAT_PREFIX
from cdc.errors import PositionNotReached, SnapshotInvalidated
from cdc.position import Position
from cdc.postgres import logical_messages
from cdc.postgres.connection import connect
from cdc.postgres.copy import begin_snapshot, lock_tables
from cdc.postgres.publication import published_rows
from cdc.postgres.slot import create_slot
from cdc.postgres.tables import match_tables
from cdc.stores.published import Published
from cdc.table import TableSchema

ATTEMPTS: Final = 10
"""Snapshots taken before a sink that runs ahead each time is an error."""
SILENT_AFTER: Final = 10.0
"""Seconds without a report after which the apply process counts as gone; it reports every second."""
POLL: Final = 0.05
"""Seconds between two looks at the commands: the wait is for another process, through a database."""
PASSED: Final = "passed"
"""Why a sink refuses: it had published beyond the cut."""


@dataclass(frozen=True, slots=True)
class KeptCutAt:
    """One sink at the cut."""

    record: Published
    handle: str
    """How the engine finds the cut again; given back with a release."""


@dataclass(frozen=True, slots=True)
class ConsistentCut:
    """The source and the sinks at one position."""

    position: Position
    source: Any
    """A connection of cdc.postgres inside a transaction that sees the snapshot; for one thread."""
    sinks: Mapping[str, KeptCutAt]
    publication: str
    """Which columns and rows of the source are meant to be in the sinks."""
    rows_of: Callable[[TableSchema], Iterator[memoryview]]
    """Reads those rows of a table, as copy_table gives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRequest:
    """What to hold against each other."""

    pipeline: str
    dsn: str
    sinks: Sequence[str]
    patterns: Sequence[str]
    exclude: Sequence[str]
    publication: str
    epoch: int
    timeout: float
    """Seconds for all attempts together."""


@contextmanager
def consistent_cut(catalog: Catalog, request: CutRequest) -> Iterator[ConsistentCut]:
    """Take a cut and keep it readable inside the block; raises PositionNotReached when the deadline passes."""
    deadline = time.monotonic() + request.timeout
    for _ in range(ATTEMPTS):
        require_apply(catalog, request.pipeline)
        with connect(request.dsn, autocommit=False, application_name="cdc verify") as source:
            commands: dict[str, int] = {}
            try:
                position = _ask(catalog, request, source, commands)
                kept = _wait(catalog, request, commands, deadline)
                if kept is not None:
                    yield ConsistentCut(
                        position, source, kept, request.publication, published_rows(source, request.publication)
                    )
                    return
            except SnapshotInvalidated:
                continue  # a TRUNCATE came between snapshot and lock: take another
            finally:
                _release(catalog, request.pipeline, commands)
    raise PositionNotReached(
        f"a sink was already after each of {ATTEMPTS} snapshots of the source",
        remedy="verify again when the load is lower",
    )


def require_apply(catalog: Catalog, pipeline: str) -> None:
    """Raise PositionNotReached unless the apply process reported lately: nobody else ends a batch."""
    seen = next((p.reported_at for p in catalog.processes.ls(pipeline) if p.process == "apply"), None)
    if seen is None:
        raise PositionNotReached(
            f"the apply process of pipeline {pipeline!r} has never run", remedy="start 'cdc run' and try again"
        )
    age = (datetime.now(UTC) - seen).total_seconds()
    if age > SILENT_AFTER:
        raise PositionNotReached(
            f"the apply process of pipeline {pipeline!r} is not running: its last report is {age:.0f} s old",
            remedy="start 'cdc run', then verify again",
        )


def _ask(catalog: Catalog, request: CutRequest, source: Any, commands: dict[str, int]) -> Position:
    """Take a snapshot into `source` and ask every sink for it; the commands are noted as they are posted."""
    with create_slot(request.dsn, f"cdc_verify_{uuid.uuid4().hex[:12]}", temporary=True) as exported:
        position = Position.of(exported.consistent_point - 1, request.epoch)
        # before anything else: every millisecond from here on a sink may pass the cut
        for sink in request.sinks:
            commands[sink] = catalog.commands.post(request.pipeline, "cut", {"sink": sink, "position": int(position)})
        begin_snapshot(source, exported.name)
        lock_tables(source, match_tables(source, request.patterns, request.exclude))
    with connect(request.dsn, application_name="cdc verify") as conn:
        logical_messages.emit_message(conn, HEARTBEAT_PREFIX, "verify")
    return position


def _wait(
    catalog: Catalog, request: CutRequest, commands: Mapping[str, int], deadline: float
) -> dict[str, KeptCutAt] | None:
    """The sinks at the cut, or None when one of them had passed it."""
    while True:
        found = {sink: _finished(catalog, command) for sink, command in commands.items()}
        refused = {sink: c for sink, c in found.items() if c is not None and c.state is CommandState.FAILED}
        for sink, command in refused.items():
            reason = (command.result or {}).get("reason")
            if reason != PASSED:
                raise PositionNotReached(f"sink {sink!r} cannot stop at the cut: {reason}")
        if refused:
            return None
        if all(found.values()):
            return {sink: _kept(command) for sink, command in found.items() if command is not None}
        if time.monotonic() >= deadline:
            raise PositionNotReached(
                _why(catalog, request, [sink for sink, command in found.items() if command is None])
            )
        require_apply(catalog, request.pipeline)
        time.sleep(POLL)


def _finished(catalog: Catalog, command: int) -> Command | None:
    found = catalog.commands.get(command)
    return found if found is not None and found.state is not CommandState.PENDING else None


def _kept(command: Command) -> KeptCutAt:
    result = command.result or {}
    return KeptCutAt(Published.from_json(json.dumps(result["record"])), str(result["handle"]))


def _why(catalog: Catalog, request: CutRequest, sinks: Sequence[str]) -> str:
    states = {
        sink.sink: f" ({sink.state}: {sink.reason})" for sink in catalog.sinks.ls(request.pipeline) if sink.reason
    }
    names = ", ".join(f"{sink!r}{states.get(sink, '')}" for sink in sinks)
    return f"no batch ended at the cut within {request.timeout:.0f} s: {names}"


def _release(catalog: Catalog, pipeline: str, commands: Mapping[str, int]) -> None:
    for sink, command in commands.items():
        catalog.commands.finish(command, {"reason": "abandoned"}, ok=False)  # one that is finished stays as it is
        found = catalog.commands.get(command)
        if found is not None and found.state is CommandState.DONE:
            handle = (found.result or {})["handle"]
            catalog.commands.post(pipeline, "release", {"sink": sink, "handle": handle})
