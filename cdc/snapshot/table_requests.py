"""Tables: how one asks the reader to hold its tables against the definition, or to skip the copy of some; its answer.

The reader carries it out, in `snapshot/keeping.py`.
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
"""The kind that asks to hold the tables against the definition now; its result has `added`, `removed`, `refused`."""
SKIP_TABLES: Final = "tables.skip"
"""The kind that asks to take tables for exact as they are; the payload has their globs as `tables`."""
ANSWER_WITHIN: Final = 10.0
"""Seconds that a running reader is waited for."""
_POLL_EVERY: Final = 0.1


def request_table_check(catalog: Catalog, pipeline: str) -> int:
    """Ask for a look; hands back the command's number."""
    return catalog.commands.post(pipeline, CHECK_TABLES, {})


def request_skip(definition: Definition, catalog: Catalog, tables: Sequence[str], actor: str) -> tuple[int, list[str]]:
    """Ask to take tables for exact as they are, without a copy; hands back the command's number and the topics.

    `tables` are globs, of which those that need no skipping are left out. Raises UnknownName for what the log does not
    have, StateConflict where nothing is to be skipped or a copy is on its way, LogError without a log.
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
    """Raise StateConflict if a copy of one of the tables is on its way."""
    for command in catalog.commands.pending(pipeline, BACKFILL):
        request = BackfillRequest.from_json(command.payload)
        copied = [topic for topic in topics if request.resync and covers(request, topic)]
        if copied:
            raise StateConflict(
                f"copy {command.id} of {', '.join(copied)} is on its way",
                remedy=f"cdc backfill cancel {command.id} -c FILE, then ask again",
            )


def wait_for_answer(catalog: Catalog, job: int, patience: float = ANSWER_WITHIN) -> Command | None:
    """The command once it is finished; None after so many seconds."""
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
        raise UnknownName(f"no table of the log matches {glob!r}", remedy=f"tables there: {listed}")
    inexact = [schema for schema in found if schema.state is not TableState.LIVE]
    if not inexact:
        listed = ", ".join(schema.topic for schema in found[:10])
        raise StateConflict(f"live already, there is nothing to skip: {listed}", remedy="see 'cdc tables ls -c FILE'")
    return inexact
