"""Checks: what must hold between definition, source and log before a reader opens anything."""

from __future__ import annotations

from cdc.config import Definition
from cdc.errors import ConfigError, LogError, LogInaccessible, LogUnreachable, PreflightFailed, SourceError
from cdc.log.bucket import BucketPath, keeps_what_is_there
from cdc.log.intent import declared
from cdc.log.read import LogReader
from cdc.postgres.connection import connect
from cdc.postgres.history import source_state
from cdc.postgres.preflight import Problem, Wants, preflight
from cdc.postgres.tables import matched_schemas
from cdc.resume import captured, check_source
from cdc.settings import publication_control
from cdc.table import TableSchema
from cdc.targets import tables_in


def problems(definition: Definition) -> list[Problem]:
    """Everything that keeps the source from being captured, the fatal first; changes nothing.

    Of a log in an object store also what cannot be done there, for which one small file is written and removed.
    """
    source = definition.source
    wants = Wants(
        slot=source.slot.name,
        publication=source.publication.name,
        patterns=definition.patterns,
        exclude=definition.excludes,
        create_slot=source.slot.create,
        control=publication_control(definition),
    )
    return [*storage_problems(definition), *preflight(source.current_dsn(), wants)]


def tables_of(definition: Definition) -> list[TableSchema]:
    """The tables that the definition means: those of the source, or of the log where the source does not answer."""
    try:
        return matched_schemas(definition.source.current_dsn(), definition.patterns, definition.excludes)
    except (SourceError, ConfigError):
        pass  # `problems` says why
    try:
        return tables_in(LogReader(definition.log.root))
    except LogError:
        return []


def storage_problems(definition: Definition) -> list[Problem]:
    """What a log cannot do where it is to lie; nothing of a directory, which is made when it is needed."""
    root = definition.log.root
    if not isinstance(root, BucketPath):
        return []
    try:
        told = (
            "" if keeps_what_is_there(root) else "the store overwrites what was to be new: it cannot tell writers apart"
        )
        code, fix = LogInaccessible.code, "use a store that keeps If-None-Match"
    except (LogInaccessible, LogUnreachable) as exc:
        told, code, fix = exc.message, exc.code, exc.fix
    return [Problem(code=code, subject=definition.log.path, message=f"{told}: {fix}")] if told else []


def check_log(definition: Definition) -> None:
    """Hold the log against the source; raises what check_source says.

    Where there is no log yet the source is held against the definition: PreflightFailed names all that a person has
    to mend, so that nothing is made half. A log that waits for a new epoch fits any source.
    """
    root, source = definition.log.root, definition.source
    try:
        log = LogReader(root)
    except (LogInaccessible, LogUnreachable):
        raise
    except LogError:
        _check_first_start(definition)
        return
    last = log.last_commit
    intent = declared(root)
    if last is None:
        _check_first_start(definition)
        return
    if intent is not None and last.last.epoch < intent.epoch:
        return
    tables = captured(log.schemas())
    state = source_state(source.current_dsn(), source.slot.name, source.publication.name, tables)
    check_source(log.identity, last, state, LogReader(root).durable)


def _check_first_start(definition: Definition) -> None:
    with connect(definition.source.current_dsn(), application_name="cdc preflight"):
        pass  # what is wrong with the connection itself has its own error, and mostly passes
    fatal = [problem for problem in problems(definition) if problem.fatal]
    if fatal:
        listed = "".join(f"\n  {problem.subject}: {problem.message}" for problem in fatal)
        raise PreflightFailed(f"the source cannot be captured yet, {len(fatal)} to mend:{listed}")
