"""Targets: what keeps the tables that there are from going where a definition's sinks put them, told before any write.

Two look: `cdc doctor`, at the tables of the source, and the apply process before it begins a sink, at those of the log.
A table for which it comes true later stops alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from cdc.config import Definition, DeltaSinkDefinition, SinkRule, TableSettings, rule_of, table_settings
from cdc.config.column_checks import ColumnMismatch
from cdc.config.column_checks import column_mismatches as misfits_of_columns
from cdc.config.sinks import target_path
from cdc.config.yaml_document import Key
from cdc.errors import (
    CdcError,
    LogCorrupt,
    LogError,
    LogFormatUnknown,
    LogInaccessible,
    LogUnreachable,
    SinkUnavailable,
    TargetUnusable,
    TransformFailed,
)
from cdc.log.reader import LogReader
from cdc.stores.path_ownership import check_place
from cdc.table import TableSchema, TableState, matches

AT_ONCE: Final = 16
"""Places looked at side by side: in an object store each look takes as long as the store does to answer."""


@dataclass(frozen=True, slots=True)
class SinkTables:
    """One table of one Delta sink."""

    sink: DeltaSinkDefinition
    place: int
    """Of the sink in the definition."""
    schema: TableSchema

    @property
    def rule(self) -> SinkRule | None:
        """The rule that counts for it."""
        return rule_of(self.schema.topic, self.sink.rules)

    @property
    def settings(self) -> TableSettings:
        """How it is kept."""
        return table_settings(self.schema.topic, self.sink, self.sink.rules)

    def key(self, *below: str | int) -> Key:
        """Where something is said of it: by its rule if that does, else by the sink."""
        rule = self.rule
        if rule is not None and below[0] in rule.model_fields_set:
            return ("sinks", self.place, "rules", self.sink.rules.index(rule), *below)
        return ("sinks", self.place, *below)


def fed(definition: Definition, tables: Sequence[TableSchema], sinks: Collection[str]) -> Iterator[SinkTables]:
    """The tables of each Delta sink among those named."""
    for place, sink in enumerate(definition.sinks):
        if isinstance(sink, DeltaSinkDefinition) and sink.name in sinks:
            yield from (SinkTables(sink, place, schema) for schema in tables if matches(schema.topic, sink.tables))


def tables_in(log: LogReader) -> list[TableSchema]:
    """The tables that the log follows."""
    return [schema for schema in log.schemas().values() if schema.state is not TableState.DROPPED]


def judged(definition: Definition, tables: Sequence[TableSchema]) -> list[ColumnMismatch]:
    """What is wrong with every sink, but for what takes Spark to find.

    Where there is a log that cannot be read, whose targets are ours is not known: places are not looked at.
    """
    sinks = {sink.name for sink in definition.sinks}
    found = misfits(definition, tables, sinks)
    try:
        return [*found, *taken(definition, tables, sinks, LogReader(definition.log.root).log_id)]
    except (LogCorrupt, LogFormatUnknown, LogInaccessible, LogUnreachable):
        return found
    except LogError:
        return [*found, *taken(definition, tables, sinks, None)]


def misfits(definition: Definition, tables: Sequence[TableSchema], sinks: Collection[str]) -> list[ColumnMismatch]:
    """What rules name that their tables do not have."""
    return [
        ColumnMismatch(one.key(*key), error)
        for one in fed(definition, tables, sinks)
        for key, error in misfits_of_columns(one.schema, one.rule, one.settings)
    ]


def taken(
    definition: Definition, tables: Sequence[TableSchema], sinks: Collection[str], log_id: str | None
) -> list[ColumnMismatch]:
    """Targets in whose place something else lies or is to lie, and of each sink the first whose store does not say.

    log_id: as of check_place.
    """
    routes, found = list[tuple[str, SinkTables]](), list[ColumnMismatch]()
    for one in fed(definition, tables, sinks):
        try:
            routes.append((target_path(one.sink.path, one.sink.rules, one.schema), one))
        except TransformFailed as exc:
            found.append(ColumnMismatch(one.key("pattern"), exc))
    found += _crossing(routes)
    places = dict[str, SinkTables]()
    for uri, one in routes:
        places.setdefault(uri, one)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="places") as pool:
        answers = list(pool.map(lambda uri: _look(uri, log_id), places))
    unseen = set[int]()
    for one, error in zip(places.values(), answers, strict=True):
        if error is None or (isinstance(error, SinkUnavailable) and one.place in unseen):
            continue
        if isinstance(error, SinkUnavailable):
            unseen.add(one.place)
        told = f"table {one.schema.topic!r} cannot be written there: {error.message}"
        found.append(ColumnMismatch(one.key("path"), type(error)(told, remedy=error.fix)))
    return found


def _crossing(routes: Iterable[tuple[str, SinkTables]]) -> Iterator[ColumnMismatch]:
    """Tables whose target would lie in the place of another's, or inside of it, but for those of a rule that merges."""
    around: tuple[str, SinkTables] | None = None
    for uri, one in sorted(routes, key=lambda route: f"{route[0]}/"):
        if around is None or not f"{uri}/".startswith(f"{around[0]}/"):
            around = uri, one
            continue
        other, owner = around
        if uri != other or one.rule is None or not one.rule.merge_tables or one.rule is not owner.rule:
            told = (
                f"the target of table {one.schema.topic!r} would be {uri!r}, which overlaps {other!r}, the target "
                "of table "
                f"{owner.schema.topic!r}"
            )
            yield ColumnMismatch(one.key("path"), TransformFailed(told))


def _look(uri: str, log_id: str | None) -> CdcError | None:
    try:
        check_place(uri, log_id)
    except (SinkUnavailable, TargetUnusable) as exc:
        return exc
    return None
