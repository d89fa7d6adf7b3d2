"""What the parts of a definition must agree on: found after each part is right by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from cdc.config.definition import Definition
from cdc.config.names import fixed_part, is_remote, placeholders
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
from cdc.config.storage import storage_keys
from cdc.config.yaml_document import Key
from cdc.table import matches

_WILD: Final = frozenset("*?[")
_MERGED_CHANGES: Final = frozenset({SchemaChanges.EVOLVE, SchemaChanges.EXCEPTION})
"""What may become of a target of many tables when one of them changes its columns: the others know no other name for
a column, and no other type."""


_FOLLOWING: Final = frozenset({SchemaChanges.EVOLVE, SchemaChanges.TRY_EVOLVE})
"""By which of them a target may lose a column: of the others one stops, and by the rest it keeps what it has."""
_OF_COLUMNS: Final = frozenset({"dropped_columns", "schema_changes", "merge_tables", "transform", *EXCLUSIVE_KEYS[0]})
"""What has to go together where columns are dropped."""


class Disagreement(NamedTuple):
    """A key and why it cannot stand beside another."""

    key: Key
    message: str


def disagreements(definition: Definition) -> Iterator[Disagreement]:
    """All of them, each named at the key that a person would change."""
    yield from _names(definition)
    yield from _paths(definition)
    yield from _signals(definition)
    yield from _storage(definition)
    yield from _modes(definition)
    yield from _routes(definition)
    if not definition.catalog.url:
        yield Disagreement(("catalog",), "required key is missing: catalog.url, for the log is not on this machine")
    if is_remote(definition.spark.checkpoint):
        yield Disagreement(("spark", "checkpoint"), "expected a directory of this machine")
    if definition.sinks and not definition.spark.checkpoint:
        yield Disagreement(("spark",), "required key is missing: spark.checkpoint, for the log is not on this machine")


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
        yield Disagreement(("snapshot", "signals"), "no rule captures this table: add it to tables")


def _storage(definition: Definition) -> Iterator[Disagreement]:
    log, key = definition.log, ("log", "storage")
    said, scheme = log.storage.model_fields_set, log.path.partition("://")[0]
    for name in sorted(said - storage_keys(scheme)):
        store = f"a store of {scheme}://" if is_remote(log.path) else "a directory, which is what log.path names"
        yield Disagreement((*key, name), f"is nothing for {store}")
    if (log.storage.endpoint or "").startswith("http://") and not log.storage.allow_http:
        yield Disagreement((*key, "endpoint"), "keys would pass unencrypted: use https://, or add allow_http: true")


def _paths(definition: Definition) -> Iterator[Disagreement]:
    taken = {definition.log.path: "the log"}
    many_schemas = len({_schema(glob) for glob in definition.patterns}) > 1
    for place, sink in enumerate(definition.sinks):
        key: Key = ("sinks", place, "path")
        names = placeholders(sink.path)
        if isinstance(sink, SearchSinkDefinition) and is_remote(sink.path):
            yield Disagreement(key, "expected a directory: an index is not kept in an object store")
        if "table" in names and "schema" not in names and (many_schemas or _schema(definition.patterns[0]) is None):
            yield Disagreement(key, "expected {schema} in the path, for tables of several schemas may share a name")
        root = fixed_part(sink.path)
        for other, owner in taken.items():
            if _overlap(root, other):
                yield Disagreement(key, f"the directory above the first placeholder overlaps that of {owner}")
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
    """said: by the sink or a rule; meant: what it comes to."""
    transform = said.transform if isinstance(said, SinkRule) else None
    if transform is not None and meant.keeping is not HistoryMode.LATEST:
        for name in ("python", "computed", "where"):
            if getattr(transform, name):
                found = f"cannot stand beside {meant.keeping.value!r}: it needs a target of the latest state of rows"
                yield Disagreement((*key, "transform", name), found)
    yield from _dropping(said, meant, key)
    for group in EXCLUSIVE_KEYS:
        both = sorted(name for name in group & said.model_fields_set if getattr(said, name))
        if len(both) > 1:
            yield Disagreement((*key, both[0]), f"cannot stand beside {both[1]}: keep one of them")
    for name in ("track_history_column_list", "track_history_except_column_list"):
        if getattr(said, name) and meant.keeping is not HistoryMode.VERSIONS:
            yield Disagreement((*key, name), "is nothing without stored_as_scd_type: 2")
        for column in sorted({*getattr(said, name)} & {*meant.except_column_list}):
            yield Disagreement((*key, name), f"names {column!r}, which except_column_list leaves out")


def _dropping(said: TableSettings, meant: TableSettings, key: Key) -> Iterator[Disagreement]:
    """Why columns cannot be dropped of what the sink or the rule says; what it only inherits is told above."""
    if meant.dropped_columns is not DroppedColumns.DROP or not _OF_COLUMNS & said.model_fields_set:
        return
    key = (*key, "dropped_columns")
    if meant.keeping is not HistoryMode.LATEST:
        found = f"drop cannot stand beside {meant.keeping.value!r}: what older rows held would go with the column"
        yield Disagreement(key, found)
    if meant.schema_changes not in _FOLLOWING:
        changes = meant.schema_changes.value
        yield Disagreement(key, f"drop cannot stand beside 'schema_changes: {changes}': expected evolve or try_evolve")
    if isinstance(said, SinkRule) and said.transform is not None and said.transform.python is not None:
        yield Disagreement(key, "drop cannot stand beside transform.python: it does not tell what it makes of which")
    if isinstance(said, SinkRule) and said.merge_tables:
        yield Disagreement(key, "drop cannot stand beside merge_tables: other tables have rows in the column")


def _merged(meant: TableSettings, key: Key) -> Iterator[Disagreement]:
    """What a target of many tables cannot be."""
    if meant.keeping is not HistoryMode.LATEST:
        found = f"cannot stand beside {meant.keeping.value!r}: of many tables only the latest state is kept"
        yield Disagreement(key, found)
    if meant.schema_changes not in _MERGED_CHANGES:
        found = f"cannot stand beside 'schema_changes: {meant.schema_changes.value}': expected evolve or exception"
        yield Disagreement(key, found)


def _routes(definition: Definition) -> Iterator[Disagreement]:
    """Rules that would put what does not belong together into one directory, whatever the tables are called."""
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
                    "expected {table} or a group of pattern in the path: the rule fits many tables, "
                    "which share a directory only with merge_tables: true",
                )
            elif found := next((o for p, o in others.items() if _overlap(fixed_part(rule.path), p)), None):
                yield Disagreement(key, f"the directory above the first placeholder overlaps that of {found}")
            elif whole and any(r.path and _overlap(r.path, rule.path) for r in sink.rules[:number]):
                yield Disagreement(key, "another rule's directory: every table has its own")


def _schema(glob: str) -> str | None:
    """The one schema that the glob can match, or None."""
    schema = glob.partition(".")[0]
    return None if _WILD & set(schema) else schema


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
