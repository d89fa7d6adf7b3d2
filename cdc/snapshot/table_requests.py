"""Table requests: commands to a running reader to sync its tables with the definition, or to skip a copy.

The publication sync worker of the reader runs them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Event
from typing import Final

from cdc.catalog import Catalog
from cdc.catalog.commands import Command, CommandState
from cdc.config import Definition
from cdc.errors import StateConflict, UnknownName
from cdc.log.reader import LogReader
from cdc.snapshot.backfill_progress import covers
from cdc.snapshot.backfill_state import BACKFILL, BackfillRequest
from cdc.table import TableSchema, TableState, exact_glob, matches_name

CHECK_TABLES: Final = "tables.look"
"""Kind of the command to sync the tables now; its result has `added`, `removed` and `refused`."""
SKIP_TABLES: Final = "tables.skip"
"""Kind of the command to mark tables as exact without a copy; the payload has their globs as `tables`."""
ANSWER_TIMEOUT: Final = 10.0
"""Default seconds to wait for a running reader."""
_POLL_EVERY: Final = 0.1


def request_table_check(catalog: Catalog, pipeline: str) -> int:
    """Post a command to sync the tables; returns its id."""
    return catalog.commands.post(pipeline, CHECK_TABLES, {})


def request_skip(definition: Definition, catalog: Catalog, tables: Sequence[str], actor: str) -> tuple[int, list[str]]:
    """Post a command to mark tables as exact without a copy; returns its id and the topics.

    tables: globs; tables that are already live are left out. Raises UnknownName for tables that the log does not
    contain, StateConflict if all tables are live or a copy is running, LogError without a log.
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
                f"copy {command.id} of {', '.join(copied)} is running",
                remedy=f"wait for it, or run 'cdc backfill cancel {command.id} -c FILE', then try again",
            )


def wait_for_answer(catalog: Catalog, job: int, patience: float = ANSWER_TIMEOUT) -> Command | None:
    """The command when it is finished; None after `patience` seconds."""
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
        raise UnknownName(f"no table of the log matches {glob!r}", remedy=f"tables of the log: {listed}")
    inexact = [schema for schema in found if schema.state is not TableState.LIVE]
    if not inexact:
        listed = ", ".join(schema.topic for schema in found[:10])
        raise StateConflict(
            f"there is nothing to skip, the tables are already live: {listed}",
            remedy="'cdc tables ls -c FILE' shows the state of every table",
        )
    return inexact
