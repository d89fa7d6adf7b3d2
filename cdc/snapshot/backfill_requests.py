"""Asking: how a person or a program asks for backfills and speaks about them, whatever they ask through.

Nothing is read or written at the source but to see whether what is asked can be done; the running reader does the work.
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
from cdc.postgres.connection import connect
from cdc.postgres.keys import check_keys
from cdc.postgres.where_clause import check_predicate
from cdc.snapshot.backfill_progress import BackfillStatus, covers, find_backfill
from cdc.snapshot.backfill_state import BACKFILL, BackfillAction, BackfillRequest, check_request
from cdc.table import TableSchema

OUTCOME_WITHIN: Final = 5.0
"""Seconds in which a running reader has begun a backfill that no other is in front of, and ended a small one."""
_POLL_EVERY: Final = 0.1
"""Seconds between two looks at the catalog."""
_LEASE_SECONDS: Final = 10.0
"""Seconds after which who died while asking holds nobody up."""


@dataclass(frozen=True, slots=True)
class RequestedBackfill:
    """A backfill that was taken on."""

    id: int
    tables: tuple[str, ...]
    """Topics that it is about now."""


def request_backfill(
    definition: Definition, catalog: Catalog, request: BackfillRequest, actor: str
) -> RequestedBackfill:
    """Take a request on if it can be done.

    Raises ConfigError for what cannot, StateConflict if a table of it is in another backfill already, LogError without
    a log, and the source's errors when a predicate or keys are to be checked.
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
    """As ask, for keys that came from the source: it is not asked whether it could have them."""
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
    """Tell the reader something about a backfill; raises UnknownName, or StateConflict if it has ended.

    Hands back how it stands: the reader hears it within a second.
    """
    status = find_backfill(catalog, pipeline, job)
    if not status.pending:
        raise StateConflict(f"backfill {job} is {status.state} already", remedy="ask for another one")
    catalog.commands.post(pipeline, verb.kind, {"id": job})
    catalog.audit.write(actor, f"backfill {verb.value}", pipeline, {"id": job})
    return status


def wait_for_backfill(
    catalog: Catalog, pipeline: str, job: int, patience: float | None = OUTCOME_WITHIN
) -> BackfillStatus:
    """The backfill once it has ended, or as it is after so many seconds; None: however long it takes."""
    deadline, never = None if patience is None else time.monotonic() + patience, Event()
    while True:
        status = find_backfill(catalog, pipeline, job)
        if not status.pending or (deadline is not None and time.monotonic() >= deadline):
            return status
        never.wait(_POLL_EVERY)


def _refuse_overlap(catalog: Catalog, pipeline: str, topics: tuple[str, ...]) -> None:
    for other in catalog.commands.pending(pipeline, BACKFILL):
        standing = BackfillRequest.from_json(other.payload)
        shared = [topic for topic in topics if covers(standing, topic)]
        if shared:
            raise StateConflict(
                f"backfill {other.id} is already on its way over {', '.join(shared)}",
                remedy=f"wait for it, or run 'cdc backfill cancel {other.id} -c FILE'",
            )


@contextmanager
def _request_lease(catalog: Catalog, pipeline: str) -> Iterator[None]:
    """Nobody else takes a request on meanwhile: two at the same moment would not see each other."""
    lease, holder = f"asking/{pipeline}", uuid4().hex
    if not catalog.leases.acquire(lease, holder, _LEASE_SECONDS):
        raise StateConflict("another request is being taken on at this moment", remedy="ask again")
    try:
        yield
    finally:
        catalog.leases.release(lease, holder)
