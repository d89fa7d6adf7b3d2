"""Commands to the running reader: start, pause or cancel a backfill, check the published tables, or skip a copy.

CLI, API and repair store these commands in the catalog and wait for the result. They query the source only to validate
a request. The backfill worker and the publication sync of the reader carry out the commands.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Final
from uuid import uuid4

from cdc.catalog import Catalog
from cdc.catalog.commands import Command, CommandState
from cdc.config import Definition
from cdc.errors import StateConflict, UnknownName
from cdc.log.reader import LogReader
from cdc.postgres.backfill_selection import check_keys, check_predicate
from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL, BackfillAction, BackfillRequest, check_request
from cdc.snapshot.backfill_status import BackfillStatus, covers, find_backfill
from cdc.table import TableSchema, TableState, exact_glob, matches_name

OUTCOME_WITHIN: Final = 5.0
"""Default number of seconds to wait for a backfill; a running reader completes a small backfill in this time."""
CHECK_TABLES: Final = "tables.look"
"""Kind of the command to compare the source's tables with the definition's table rules now.

The result of the command has the fields `added`, `removed`, `refused` and `unread`.
"""
SKIP_TABLES: Final = "tables.skip"
"""Kind of the command to mark tables as live without a copy; the field `tables` of its payload contains globs."""
ANSWER_TIMEOUT: Final = 10.0
"""Default number of seconds to wait until the running reader finishes a command."""
_POLL_EVERY: Final = 0.1
"""Seconds between two polls of the catalog."""
_LEASE_SECONDS: Final = 10.0
"""Duration in seconds of the lease for posting a request; the lease of a killed process expires after this time."""


@dataclass(frozen=True, slots=True)
class RequestedBackfill:
    """A backfill whose request is stored in the catalog."""

    id: int
    tables: tuple[str, ...]
    """Topics of the tables that the backfill covers."""


def request_backfill(
    definition: Definition, catalog: Catalog, request: BackfillRequest, actor: str
) -> RequestedBackfill:
    """Validate a backfill request, and store it in the catalog.

    Raises ConfigError if the request is invalid, StateConflict if another pending backfill covers one of its tables,
    and LogError if the log does not exist. Checking a condition or keys at the source can also raise source errors.
    """
    sinks = {sink.name: sink for sink in definition.sinks_of_tables}
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
    """Store a backfill request without checking its keys at the source; pass only keys that the source has sent."""
    sinks = {sink.name: sink for sink in definition.sinks_of_tables}
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
    """Store an action on a backfill in the catalog, and return the status of the backfill before the action.

    The reader applies the action about a second later. Raises UnknownName if the backfill does not exist, and
    StateConflict if it has ended.
    """
    status = find_backfill(catalog, pipeline, job)
    if not status.pending:
        raise StateConflict(
            f"backfill {job} has already ended with state {status.state}", remedy="start another backfill"
        )
    catalog.commands.post(pipeline, verb.kind, {"id": job})
    catalog.audit.write(actor, f"backfill {verb.value}", pipeline, {"id": job})
    return status


def wait_for_backfill(
    catalog: Catalog, pipeline: str, job: int, patience: float | None = OUTCOME_WITHIN
) -> BackfillStatus:
    """Wait at most `patience` seconds until a backfill has ended, and return its status.

    If `patience` is None, wait without a limit.
    """
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
                f"the backfill was not requested: backfill {other.id} is already running for {', '.join(shared)}",
                remedy=f"wait until the backfill ends, or run 'cdc backfill cancel {other.id} -c FILE'",
            )


@contextmanager
def _request_lease(catalog: Catalog, pipeline: str) -> Iterator[None]:
    """Take a lease for the block, so that only one process at a time checks for overlaps and stores a request.

    Raises StateConflict if another process has the lease.
    """
    lease, holder = f"asking/{pipeline}", uuid4().hex
    if not catalog.leases.acquire(lease, holder, _LEASE_SECONDS):
        raise StateConflict(
            "the backfill request was not posted: another process posts a request at the same time",
            remedy="run the command again",
        )
    try:
        yield
    finally:
        catalog.leases.release(lease, holder)


def request_table_check(catalog: Catalog, pipeline: str) -> int:
    """Store the command CHECK_TABLES in the catalog, and return its id."""
    return catalog.commands.post(pipeline, CHECK_TABLES, {})


def request_skip(definition: Definition, catalog: Catalog, tables: Sequence[str], actor: str) -> tuple[int, list[str]]:
    """Store a command to mark tables as live without a copy; return its id and the topics of the tables.

    `tables` contains globs; tables that are already live are left out. Raises UnknownName if a glob matches no table of
    the log, and LogError if the log does not exist. Raises StateConflict if all tables of a glob are live, or if a copy
    of a chosen table is pending.
    """
    known = [s for s in LogReader(definition.log.root).schemas().values() if s.state is not TableState.DROPPED]
    chosen: dict[str, TableSchema] = {}
    for glob in tables:
        chosen |= {schema.topic: schema for schema in _inexact_tables(known, glob)}
    check_not_copying(catalog, definition.name, sorted(chosen))
    topics = sorted(chosen)
    job = catalog.commands.post(definition.name, SKIP_TABLES, {"tables": [exact_glob(topic) for topic in topics]})
    catalog.audit.write(actor, "tables skip", definition.name, {"id": job, "tables": topics})
    return job, topics


def check_not_copying(catalog: Catalog, pipeline: str, topics: Sequence[str]) -> None:
    """Raise StateConflict if a copy of one of the tables is pending."""
    for command in catalog.commands.pending(pipeline, BACKFILL):
        request = BackfillRequest.from_json(command.payload)
        copied = [topic for topic in topics if request.resync and covers(request, topic)]
        if copied:
            raise StateConflict(
                f"a copy cannot be skipped while it runs: copy {command.id} of {', '.join(copied)} is running",
                remedy=f"wait until the copy ends, or run 'cdc backfill cancel {command.id} -c FILE', then run "
                "the command again",
            )


def wait_for_answer(catalog: Catalog, job: int, patience: float = ANSWER_TIMEOUT) -> Command | None:
    """Wait at most `patience` seconds until a command is finished, and return the finished command.

    Returns None if the command is still pending after this time, or does not exist.
    """
    deadline, never = time.monotonic() + patience, Event()
    while True:
        command = catalog.commands.get(job)
        if command is None or command.state is not CommandState.PENDING:
            return command
        if time.monotonic() >= deadline:
            return None
        never.wait(_POLL_EVERY)


def _inexact_tables(known: Sequence[TableSchema], glob: str) -> list[TableSchema]:
    found = [schema for schema in known if matches_name(schema.topic, [glob])]
    if not found:
        listed = ", ".join(sorted(schema.topic for schema in known)[:10]) or "none"
        raise UnknownName(
            f"no table of the log matches {glob!r}", remedy=f"choose one of the tables of the log: {listed}"
        )
    inexact = [schema for schema in found if schema.state is not TableState.LIVE]
    if not inexact:
        listed = ", ".join(schema.topic for schema in found[:10])
        raise StateConflict(
            f"the copy of tables {listed} cannot be skipped: the tables are already live",
            remedy="run 'cdc tables ls -c FILE' to see the state of every table",
        )
    return inexact
