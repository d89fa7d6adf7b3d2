"""Backfill requests: validates and posts requests and actions for backfills, for CLI, API and repair.

The source is only queried to validate a request. The running reader carries it out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Final
from uuid import uuid4

from cdc.catalog import Catalog
from cdc.config import Definition
from cdc.errors import StateConflict
from cdc.log.reader import LogReader
from cdc.postgres.backfill_selection import check_keys, check_predicate
from cdc.postgres.connection import connect
from cdc.snapshot.backfill_progress import BackfillStatus, covers, find_backfill
from cdc.snapshot.backfill_state import BACKFILL, BackfillAction, BackfillRequest, check_request
from cdc.table import TableSchema

OUTCOME_WITHIN: Final = 5.0
"""Seconds in which a running reader begins a backfill that is not queued, and completes a small one."""
_POLL_EVERY: Final = 0.1
"""Seconds between two polls of the catalog."""
_LEASE_SECONDS: Final = 10.0
"""Seconds after which the lease of a killed process expires."""


@dataclass(frozen=True, slots=True)
class RequestedBackfill:
    """A backfill that was posted to the catalog."""

    id: int
    tables: tuple[str, ...]
    """Topics that it covers."""


def request_backfill(
    definition: Definition, catalog: Catalog, request: BackfillRequest, actor: str
) -> RequestedBackfill:
    """Validate a request and post it.

    Raises ConfigError for an invalid request, StateConflict if another pending backfill covers one of its tables,
    LogError without a log, and source errors while a predicate or keys are checked.
    """
    sinks = {sink.name: sink for sink in definition.sinks}
    tables = check_request(request, LogReader(definition.log.root).schemas(), sinks)
    if request.where is not None:
        with connect(definition.source.current_dsn(), application_name="cdc backfill") as conn:
            for schema in tables:
                check_predicate(conn, schema, request.where)
    if request.keys is not None:
        with connect(definition.source.current_dsn(), application_name="cdc backfill") as conn:
            check_keys(conn, tables[0], request.keys)
    return _post_request(definition, catalog, request, tables, actor)


def request_keys(definition: Definition, catalog: Catalog, request: BackfillRequest, actor: str) -> RequestedBackfill:
    """Post a request for keys that were read from the source; they are not validated there again."""
    sinks = {sink.name: sink for sink in definition.sinks}
    tables = check_request(request, LogReader(definition.log.root).schemas(), sinks)
    return _post_request(definition, catalog, request, tables, actor)


def _post_request(
    definition: Definition, catalog: Catalog, request: BackfillRequest, tables: list[TableSchema], actor: str
) -> RequestedBackfill:
    topics = tuple(sorted(schema.topic for schema in tables))
    with _request_lease(catalog, definition.name):
        _refuse_overlap(catalog, definition.name, topics)
        job = catalog.commands.post(definition.name, BACKFILL, request.to_json())
    action = "tables resync" if request.resync else "backfill"
    catalog.audit.write(actor, action, definition.name, {"id": job, "tables": list(topics)})
    return RequestedBackfill(job, topics)


def send_action(catalog: Catalog, pipeline: str, job: int, verb: BackfillAction, actor: str) -> BackfillStatus:
    """Post an action for a backfill, which the reader applies within a second; returns the current status.

    Raises UnknownName, and StateConflict if the backfill has ended.
    """
    status = find_backfill(catalog, pipeline, job)
    if not status.pending:
        raise StateConflict(f"backfill {job} has already ended: it is {status.state}", remedy="start another backfill")
    catalog.commands.post(pipeline, verb.kind, {"id": job})
    catalog.audit.write(actor, f"backfill {verb.value}", pipeline, {"id": job})
    return status


def wait_for_backfill(
    catalog: Catalog, pipeline: str, job: int, patience: float | None = OUTCOME_WITHIN
) -> BackfillStatus:
    """Status of a backfill when it has ended, or after `patience` seconds; None waits without limit."""
    deadline, never = None if patience is None else time.monotonic() + patience, Event()
    while True:
        status = find_backfill(catalog, pipeline, job)
        if not status.pending or (deadline is not None and time.monotonic() >= deadline):
            return status
        never.wait(_POLL_EVERY)


def _refuse_overlap(catalog: Catalog, pipeline: str, topics: tuple[str, ...]) -> None:
    for other in catalog.commands.pending(pipeline, BACKFILL):
        pending = BackfillRequest.from_json(other.payload)
        shared = [topic for topic in topics if covers(pending, topic)]
        if shared:
            raise StateConflict(
                f"backfill {other.id} is already running for {', '.join(shared)}",
                remedy=f"wait for it, or run 'cdc backfill cancel {other.id} -c FILE'",
            )


@contextmanager
def _request_lease(catalog: Catalog, pipeline: str) -> Iterator[None]:
    """Lease that serializes requests; two concurrent ones would not see each other."""
    lease, holder = f"asking/{pipeline}", uuid4().hex
    if not catalog.leases.acquire(lease, holder, _LEASE_SECONDS):
        raise StateConflict("another backfill request is being posted", remedy="run the command again")
    try:
        yield
    finally:
        catalog.leases.release(lease, holder)
