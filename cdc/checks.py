"""Checks: what must hold between definition, source and log before a reader opens anything."""

from __future__ import annotations

from collections.abc import Sequence

from cdc.config import Definition, DeltaSink, rule_of, settings_of
from cdc.config.columns import kept
from cdc.config.sinks import Sink
from cdc.errors import (
    ConfigError,
    LogError,
    LogInaccessible,
    LogUnreachable,
    MaskedElsewhere,
    PreflightFailed,
    SourceError,
)
from cdc.log.bucket import BucketPath, keeps_what_is_there
from cdc.log.intent import declared
from cdc.log.read import LogReader
from cdc.postgres.connection import connect
from cdc.postgres.history import source_state
from cdc.postgres.preflight import Problem, Wants, preflight
from cdc.postgres.tables import matched_schemas
from cdc.remedy import literal
from cdc.resume import captured, check_source
from cdc.settings import publication_control
from cdc.stores.lake import Lake
from cdc.stores.rules import TargetRules
from cdc.table import TableSchema, matches
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


def rule_problems(definition: Definition, file: str) -> list[Problem]:
    """Tables of which a target was filled under other rules than the definition has; file: where that lies."""
    found = []
    for sink in definition.sinks:
        if not isinstance(sink, DeltaSink):
            continue
        for topic, error in Lake.open(sink.path, TargetRules.of(sink)).differences():
            fix = literal(error.fix, sink=sink.name, topic=topic, file=file)
            found.append(Problem(error.code, topic, f"sink {sink.name!r}: {error.message}; {fix}"))
    return found


def mask_problems(definition: Definition, tables: Sequence[TableSchema]) -> list[Problem]:
    """Columns that one sink masks and another has as the source sends them; somebody should know."""
    found = []
    for schema in tables:
        feeding = [sink for sink in definition.sinks if matches(schema.topic, sink.tables)]
        masked = {sink.name: _masked(sink, schema) for sink in feeding}
        for sink in feeding:
            for other, columns in masked.items():
                if clear := sorted(columns - _unshown(sink, schema)):
                    message = f"sink {sink.name!r} shows {', '.join(map(repr, clear))}, which sink {other!r} masks"
                    fix = MaskedElsewhere.remedy
                    found.append(Problem(MaskedElsewhere.code, schema.topic, f"{message}; {fix}", fatal=False))
    return found


def _masked(sink: Sink, schema: TableSchema) -> set[str]:
    rule = rule_of(schema.topic, sink.rules) if isinstance(sink, DeltaSink) else None
    transform = None if rule is None else rule.transform
    return set() if transform is None else set(transform.mask)


def _unshown(sink: Sink, schema: TableSchema) -> set[str]:
    """Columns of which a sink does not show the values."""
    if not isinstance(sink, DeltaSink):
        return set()
    rule, all_columns = rule_of(schema.topic, sink.rules), {column.name for column in schema.columns}
    there = {column.name for column in kept(schema, settings_of(schema.topic, sink, sink.rules)).columns}
    transform = None if rule is None else rule.transform
    return all_columns - there | (set() if transform is None else {*transform.mask, *transform.drop})


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
