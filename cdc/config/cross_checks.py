"""Finds keys of a definition that conflict with each other. Each single key must already be validated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from cdc.config.definition import Definition
from cdc.config.field_types import fixed_part, is_remote, placeholders
from cdc.config.object_store import storage_keys
from cdc.config.sinks import (
    EXCLUSIVE_KEYS,
    DeltaSinkDefinition,
    DroppedColumns,
    HistoryMode,
    SchemaChanges,
    SearchSinkDefinition,
    SinkRule,
    TableSettings,
    settings_with_rule,
)
from cdc.config.yaml_document import Key
from cdc.table import matches

_WILD: Final = frozenset("*?[")
_MERGED_CHANGES: Final = frozenset({SchemaChanges.EVOLVE, SchemaChanges.EXCEPTION})
"""Schema-change policies that a shared target (`merge_tables`) supports.

All source tables of a shared target must have the same columns.
"""
_FOLLOWING: Final = frozenset({SchemaChanges.EVOLVE, SchemaChanges.TRY_EVOLVE})
"""Schema-change policies under which a target can drop a column."""
_OF_COLUMNS: Final = frozenset({"dropped_columns", "schema_changes", "merge_tables", "transform", *EXCLUSIVE_KEYS[0]})
"""Keys that can conflict with `dropped_columns: drop`."""


class Disagreement(NamedTuple):
    """A key that conflicts with another key, and the reason."""

    key: Key
    message: str


def disagreements(definition: Definition) -> Iterator[Disagreement]:
    """Yield all conflicts in a definition, each with the key that the user should change."""
    yield from _names(definition)
    yield from _paths(definition)
    yield from _signals(definition)
    yield from _storage(definition)
    yield from _modes(definition)
    yield from _routes(definition)
    if not definition.catalog.url:
        yield Disagreement(("catalog",), "required key is missing: catalog.url, because the log is in an object store")
    if is_remote(definition.spark.checkpoint):
        yield Disagreement(
            ("spark", "checkpoint"), "expected a local directory: the checkpoint cannot be in an object store"
        )
    if definition.sinks and not definition.spark.checkpoint:
        message = "required key is missing: spark.checkpoint, because the log is in an object store"
        yield Disagreement(("spark",), message)


def _names(definition: Definition) -> Iterator[Disagreement]:
    seen: set[str] = set()
    for place, sink in enumerate(definition.sinks):
        if sink.name in seen:
            yield Disagreement(("sinks", place, "name"), "another sink has this name")
        seen.add(sink.name)
    matches: set[str] = set()
    for place, rule in enumerate(definition.tables):
        if rule.match in matches:
            yield Disagreement(("tables", place, "match"), "another rule has this glob")
        matches.add(rule.match)


def _signals(definition: Definition) -> Iterator[Disagreement]:
    table = definition.snapshot.signals
    if table is not None and (not matches(table, definition.patterns) or matches(table, definition.excludes)):
        yield Disagreement(("snapshot", "signals"), "no rule captures this table: add the table to 'tables'")


def _storage(definition: Definition) -> Iterator[Disagreement]:
    log, key = definition.log, ("log", "storage")
    said, scheme = log.storage.model_fields_set, log.path.partition("://")[0]
    for name in sorted(said - storage_keys(scheme)):
        kind = f"in a store of {scheme}://" if is_remote(log.path) else "a local directory"
        yield Disagreement((*key, name), f"has no effect: log.path is {kind}")
    if (log.storage.endpoint or "").startswith("http://") and not log.storage.allow_http:
        message = "an http:// endpoint sends access keys unencrypted: use https://, or add allow_http: true"
        yield Disagreement((*key, "endpoint"), message)


def _paths(definition: Definition) -> Iterator[Disagreement]:
    taken = {definition.log.path: "the log"}
    many_schemas = len({_schema(glob) for glob in definition.patterns}) > 1
    for place, sink in enumerate(definition.sinks):
        key: Key = ("sinks", place, "path")
        names = placeholders(sink.path)
        if isinstance(sink, SearchSinkDefinition) and is_remote(sink.path):
            yield Disagreement(key, "expected a local directory: a search index cannot be in an object store")
        if "table" in names and "schema" not in names and (many_schemas or _schema(definition.patterns[0]) is None):
            yield Disagreement(key, "expected {schema} in the path: tables of different schemas can have the same name")
        root = fixed_part(sink.path)
        for other, owner in taken.items():
            if _overlap(root, other):
                yield Disagreement(key, f"the path up to its first placeholder overlaps the directory of {owner}")
                break
        taken[root] = f"sink {sink.name!r}"


def _modes(definition: Definition) -> Iterator[Disagreement]:
    for place, sink in enumerate(definition.sinks):
        if isinstance(sink, DeltaSinkDefinition):
            yield from _kept(sink, sink, ("sinks", place))
            for number, rule in enumerate(sink.rules):
                key: Key = ("sinks", place, "rules", number)
                meant = settings_with_rule(sink, rule)
                yield from _kept(rule, meant, key)
                if rule.merge_tables:
                    yield from _merged(meant, (*key, "merge_tables"))


def _kept(said: TableSettings, meant: TableSettings, key: Key) -> Iterator[Disagreement]:
    """Yield the conflicts among the settings of one sink or one rule.

    said: the sink or the rule as the file contains it. meant: `said`, completed by the settings that it inherits.
    """
    transform = said.transform if isinstance(said, SinkRule) else None
    if transform is not None and meant.history_mode is not HistoryMode.LATEST:
        for name in ("python", "computed", "where"):
            if getattr(transform, name):
                found = f"conflicts with {meant.history_mode.value!r}: this key requires the latest state of rows"
                yield Disagreement((*key, "transform", name), found)
    yield from _dropping(said, meant, key)
    for group in EXCLUSIVE_KEYS:
        both = sorted(name for name in group & said.model_fields_set if getattr(said, name))
        if len(both) > 1:
            yield Disagreement((*key, both[0]), f"conflicts with {both[1]}: keep only one of the two keys")
    for name in ("track_history_column_list", "track_history_except_column_list"):
        if getattr(said, name) and meant.history_mode is not HistoryMode.VERSIONS:
            yield Disagreement((*key, name), "requires stored_as_scd_type: 2")
        for column in sorted({*getattr(said, name)} & {*meant.except_column_list}):
            yield Disagreement((*key, name), f"contains {column!r}, which except_column_list excludes")


def _dropping(said: TableSettings, meant: TableSettings, key: Key) -> Iterator[Disagreement]:
    """Yield the conflicts of `dropped_columns: drop` with other keys of a sink or a rule.

    Yields nothing if `said` contains none of the keys in _OF_COLUMNS: a conflict is then reported at the sink.
    """
    if meant.dropped_columns is not DroppedColumns.DROP or not _OF_COLUMNS & said.model_fields_set:
        return
    key = (*key, "dropped_columns")
    if meant.history_mode is not HistoryMode.LATEST:
        found = f"'drop' conflicts with {meant.history_mode.value!r}: values in older rows would be lost"
        yield Disagreement(key, found)
    if meant.schema_changes not in _FOLLOWING:
        changes = meant.schema_changes.value
        yield Disagreement(key, f"'drop' conflicts with 'schema_changes: {changes}': expected evolve or try_evolve")
    if isinstance(said, SinkRule) and said.transform is not None and said.transform.python is not None:
        message = "'drop' conflicts with 'transform.python': its output columns cannot be traced to source columns"
        yield Disagreement(key, message)
    if isinstance(said, SinkRule) and said.merge_tables:
        yield Disagreement(
            key, "'drop' conflicts with 'merge_tables': the other source tables may still have the column"
        )


def _merged(meant: TableSettings, key: Key) -> Iterator[Disagreement]:
    """Yield a conflict for each setting that a target shared by several tables cannot have."""
    if meant.history_mode is not HistoryMode.LATEST:
        found = f"conflicts with {meant.history_mode.value!r}: a shared target requires the latest state of rows"
        yield Disagreement(key, found)
    if meant.schema_changes not in _MERGED_CHANGES:
        found = f"conflicts with 'schema_changes: {meant.schema_changes.value}': expected evolve or exception"
        yield Disagreement(key, found)


def _routes(definition: Definition) -> Iterator[Disagreement]:
    """Yield a conflict for each rule with a target whose directory can overlap another directory.

    The other directory can belong to another target of the rule, to another rule, to another sink or to the log.
    """
    for place, sink in enumerate(definition.sinks):
        if not isinstance(sink, DeltaSinkDefinition):
            continue
        others = {fixed_part(other.path): f"sink {other.name!r}" for other in definition.sinks if other is not sink}
        others[definition.log.path] = "the log"
        for number, rule in enumerate(sink.rules):
            key: Key = ("sinks", place, "rules", number, "path")
            if rule.path is None:
                continue
            whole = not placeholders(rule.path)
            one = not set(placeholders(rule.path)) - {"schema"}
            if _WILD & set(rule.match) and one and not rule.merge_tables:
                yield Disagreement(
                    key,
                    "expected {table} or a capture group of 'pattern' in the path: several tables can share a "
                    "directory only with merge_tables: true",
                )
            elif found := next((o for p, o in others.items() if _overlap(fixed_part(rule.path), p)), None):
                yield Disagreement(key, f"the path up to its first placeholder overlaps the directory of {found}")
            elif whole and any(r.path and _overlap(r.path, rule.path) for r in sink.rules[:number]):
                yield Disagreement(key, "overlaps the directory of another rule: every table needs its own directory")


def _schema(glob: str) -> str | None:
    """Return the schema in a glob over `schema.table`; None if this part of the glob contains wildcards."""
    schema = glob.partition(".")[0]
    return None if _WILD & set(schema) else schema


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
