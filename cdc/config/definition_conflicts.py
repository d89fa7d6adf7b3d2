"""Conflicts in a definition: between two of its keys, and between a sink's rule and a table. Does no I/O.

`disagreements` needs only the definition, whose single keys are already validated. `column_conflicts` needs a table of
the source: it checks that the columns named in a sink's rules exist in the table and fit its target.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from os.path import normpath
from typing import Any, Final, NamedTuple

from cdc.config.definition import Definition, EngineChoice
from cdc.config.destinations import FileDelivery
from cdc.config.field_types import LONGEST_NAME, fixed_part, is_remote, placeholders
from cdc.config.object_store import storage_keys
from cdc.config.sinks import (
    EXCLUSIVE_KEYS,
    DeltaSinkDefinition,
    DroppedColumns,
    HistoryMode,
    SchemaChanges,
    SearchRule,
    SearchSettings,
    SearchSinkDefinition,
    SinkRule,
    TableSettings,
    settings_with_rule,
)
from cdc.config.transform import Transform
from cdc.config.views import NAME_OF_VIEWS, Incremental, View
from cdc.config.yaml_document import Key
from cdc.errors import CdcError, SchemaNotApplicable, TransformFailed, ViewError, ViewKeyNull, ViewOnlyRefreshed
from cdc.table import TableSchema, matches
from cdc.target_names import column_name

CORRECT_RULE: Final = "correct the sink's rule in the definition, then restart the apply process"
_LISTS: Final = (
    "column_list",
    "except_column_list",
    "track_history_column_list",
    "track_history_except_column_list",
    "fields",
)
"""Keys of a rule that are lists of columns; not every kind of rule has all of them."""
_WILD: Final = frozenset("*?[")
_MERGED_CHANGES: Final = frozenset({SchemaChanges.EVOLVE, SchemaChanges.EXCEPTION})
"""Schema-change policies that a shared target (`merge_tables`) supports.

All source tables of a shared target must have the same columns.
"""
_FOLLOWING: Final = frozenset({SchemaChanges.EVOLVE, SchemaChanges.TRY_EVOLVE})
"""Schema-change policies under which a target can drop a column."""
_OF_COLUMNS: Final = frozenset({"dropped_columns", "schema_changes", "merge_tables", "transform", *EXCLUSIVE_KEYS[0]})
"""Keys that can conflict with `dropped_columns: drop`."""


class KeyConflict(NamedTuple):
    """A key of the definition that conflicts with a table's columns, or with the existing target."""

    key: Key
    """Path of the key in the definition: from its root, or relative to a rule or sink."""
    error: CdcError
    """The error that stops the table, or the server, if the definition is not corrected."""


class Disagreement(NamedTuple):
    """A key that conflicts with another key, and the reason."""

    key: Key
    message: str


def disagreements(definition: Definition) -> Iterator[Disagreement]:
    """Yield all conflicts in a definition, each with the key that the user should change."""
    # a sink of views that the file does not have repeats the settings, and so the conflicts, of its sink of tables
    places = {sink.name: place for place, sink in enumerate(definition.sinks)}
    repeated = {place: places.get(sink.views_of or "", place) for place, sink in enumerate(definition.sinks)}
    in_file = (
        Disagreement(("sinks", repeated[int(key[1])], *key[2:]) if key[0] == "sinks" else key, message)
        for key, message in _disagreements(definition)
    )
    yield from dict.fromkeys(in_file)


def _disagreements(definition: Definition) -> Iterator[Disagreement]:
    yield from _names(definition)
    yield from _views_of_sinks(definition)
    yield from _paths(definition)
    yield from _delivery_directories(definition)
    yield from _signals(definition)
    yield from _storage(definition)
    yield from _modes(definition)
    yield from _search_rules(definition)
    yield from _routes(definition)
    yield from _views(definition)
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
            which = "this name" if sink.views_of is None else f"the name {sink.name!r}, which the sink of its views has"
            yield Disagreement(("sinks", place, "name"), f"another sink has {which}")
        if definition.views and sink.name == NAME_OF_VIEWS:
            yield Disagreement(("sinks", place, "name"), "the state of the views is reported under this name")
        seen.add(sink.name)
    for place, delivery in enumerate(definition.deliveries):
        if delivery.name in seen:
            yield Disagreement(("deliveries", place, "name"), "another sink or delivery has this name")
        seen.add(delivery.name)
    matches: set[str] = set()
    for place, rule in enumerate(definition.tables):
        if rule.match in matches:
            yield Disagreement(("tables", place, "match"), "another rule has this glob")
        matches.add(rule.match)


def _views_of_sinks(definition: Definition) -> Iterator[Disagreement]:
    """Yield a conflict for each sink of views that is next to a sink to which it cannot belong."""
    sinks = {sink.name: sink for sink in definition.sinks_of_tables}
    for place, sink in enumerate(definition.sinks):
        if sink.views_of is None:
            continue
        key: Key = ("sinks", place, "views_of")
        tables = sinks.get(sink.views_of)
        if len(sink.name) > LONGEST_NAME:
            yield Disagreement(("sinks", place, "name"), f"too long: its views are in a sink called {sink.name!r}")
        if not sink.views or tables is None or tables.type != sink.type:
            yield Disagreement(key, "expected a sink of views, and the name of a sink of tables of the same type")
        elif isinstance(sink, DeltaSinkDefinition) and sink.path != tables.path:
            yield Disagreement(key, f"expected the path of sink {sink.views_of!r}")


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
        if not sink.path or (sink.views_of and isinstance(sink, DeltaSinkDefinition)):
            continue  # the indexes are in a search server, or the views are in the folder of a sink of tables
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


def _delivery_directories(definition: Definition) -> Iterator[Disagreement]:
    taken: dict[str, str] = {}
    for place, delivery in enumerate(definition.deliveries):
        if not isinstance(delivery, FileDelivery):
            continue
        other = taken.setdefault(normpath(delivery.path.removeprefix("file://")), delivery.name)
        if other != delivery.name:
            message = (
                f"deliveries {other!r} and {delivery.name!r} cannot share a directory: each has its progress there"
            )
            yield Disagreement(("deliveries", place, "path"), message)


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
    yield from _exclusive(said, key)
    for name in ("track_history_column_list", "track_history_except_column_list"):
        if getattr(said, name) and meant.history_mode is not HistoryMode.VERSIONS:
            yield Disagreement((*key, name), "requires stored_as_scd_type: 2")
        for column in sorted({*getattr(said, name)} & {*meant.except_column_list}):
            yield Disagreement((*key, name), f"contains {column!r}, which except_column_list excludes")


def _exclusive(said: TableSettings | SearchSettings, key: Key) -> Iterator[Disagreement]:
    """Yield a conflict for each two keys of one sink or one rule that must not both be set."""
    for group in EXCLUSIVE_KEYS:
        both = sorted(name for name in group & said.model_fields_set if getattr(said, name))
        if len(both) > 1:
            yield Disagreement((*key, both[0]), f"conflicts with {both[1]}: keep only one of the two keys")


def _search_rules(definition: Definition) -> Iterator[Disagreement]:
    """Yield the conflicts among the settings of the search sinks and of their rules."""
    for place, sink in enumerate(definition.sinks):
        if not isinstance(sink, SearchSinkDefinition):
            continue
        yield from _exclusive(sink, ("sinks", place))
        for number, rule in enumerate(sink.rules):
            key: Key = ("sinks", place, "rules", number)
            yield from _exclusive(rule, key)
            for name in ("computed", "where"):
                if rule.transform is not None and getattr(rule.transform, name):
                    message = "requires Spark, which a search sink does not use: use 'python', or remove the key"
                    yield Disagreement((*key, "transform", name), message)


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
        apart = (
            other
            for other in definition.sinks
            if other is not sink and other.views_of != sink.name and sink.views_of != other.name
        )
        others = {fixed_part(other.path): f"sink {other.name!r}" for other in apart}
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


def _views(definition: Definition) -> Iterator[Disagreement]:
    """Yield the conflicts of the views with each other, with the captured tables and with the sinks."""
    for place, view in enumerate(definition.views):
        key: Key = ("views", place)
        if any(other.name == view.name for other in definition.views[:place]):
            yield Disagreement((*key, "name"), "another view has this name")
        if matches(view.name, definition.patterns) and not matches(view.name, definition.excludes):
            yield Disagreement((*key, "name"), "a glob of 'tables' matches this name: exclude it, or choose another")
        if len({other.over for other in definition.views[: place + 1]}) > 1:
            yield Disagreement((*key, "over"), "all views of a pipeline must read the same sink")
        if definition.sink_of_view_inputs is None:
            message = "expected the name of a Delta sink of tables, whose targets the view can read"
            yield Disagreement((*key, "over") if view.over else key, message)
        yield from _view_sql(definition, view, key)
    names = [view.name for view in definition.views]
    for kind, consumers in (("sinks", definition.sinks), ("deliveries", definition.deliveries)):
        for place, consumer in enumerate(consumers):
            for number, glob in enumerate(consumer.views):
                if not any(matches(name, [glob]) for name in names):
                    yield Disagreement((kind, place, "views", number), "no view of the definition matches this glob")


def _view_sql(definition: Definition, view: View, key: Key) -> Iterator[Disagreement]:
    analysis = import_module("cdc.view_sql.view_query")  # imported late: few definitions have views
    try:
        query = analysis.query_of(view.name, {one.name: one for one in definition.views})
    except ViewError as exc:
        yield Disagreement((*key, "sql"), f"{exc.code} {exc.message}")
        return
    reason = query.only_refresh
    if cause := next((cause for cause in query.null_causes() if cause.joined), None):
        message = (
            f"{ViewKeyNull.code} column {cause.column!r} of the key is NULL in rows for which an outer join has no "
            f"match in {cause.joined!r}: {ViewKeyNull.remedy}"
        )
        yield Disagreement((*key, "key"), message)
    read = analysis.ViewQuery.parse(view.name, view.sql, view.key).inputs
    yield from _uncaptured_inputs(definition, read, (*key, "sql"))
    for other in (one for one in definition.views if one.keep is not None and one.name in read):
        message = f"view {other.name!r} has 'keep', and other views cannot read it: let this one read its tables"
        yield Disagreement((*key, "sql"), message)
    if reason is not None and view.incremental is Incremental.REQUIRED:
        message = f"{ViewOnlyRefreshed.code} the view can only be computed as a whole: {reason}"
        yield Disagreement((*key, "incremental"), message)


def _uncaptured_inputs(definition: Definition, inputs: Sequence[str], key: Key) -> Iterator[Disagreement]:
    """Yield a conflict for each table that a view reads, and that is not captured or not in the sink of its inputs."""
    names, sink = {view.name for view in definition.views}, definition.sink_of_view_inputs
    for table in (topic for topic in inputs if topic not in names):
        if not definition.captures(table):
            near = did_you_mean(table, [*names, *(rule.match for rule in definition.tables)])
            yield Disagreement(key, f"the view reads {table!r}, and no rule of 'tables' captures this table{near}")
        elif sink is not None and not matches(table, sink.tables):
            yield Disagreement(key, f"the view reads {table!r}, and sink {sink.name!r} does not have this table")


def rules_without_effect(definition: Definition) -> Iterator[Disagreement]:
    """Yield the rules for one table that have no effect, as far as the definition shows it; such rules are no errors.

    A rule for a table that is only mistyped would otherwise look like a mask of the table.
    """
    for place, sink in enumerate(definition.sinks):
        if sink.views_of is None:
            views = [view.name for view in definition.views if _shows_view(definition, sink.name, view.name)]
            for number, message in _without_effect(definition, sink, views):
                yield Disagreement(("sinks", place, "rules", number, "match"), message)
    for place, delivery in enumerate(definition.deliveries):
        views = [view.name for view in definition.views if matches(view.name, delivery.views)]
        for number, message in _without_effect(definition, delivery, views):
            yield Disagreement(("deliveries", place, "rules", number, "match"), message)


def local_indexes_on_spark(definition: Definition) -> Iterator[Disagreement]:
    """Yield the local search indexes of a definition that sends every batch to Spark, which cannot write them."""
    if definition.spark.engine is EngineChoice.SPARK:
        for sink in definition.sinks:
            if isinstance(sink, SearchSinkDefinition) and sink.engine == "tantivy":
                message = f"sink {sink.name!r} is a local index: executors fold its batches, the driver writes them"
                yield Disagreement(("spark", "engine"), message)


def _shows_view(definition: Definition, sink: str, view: str) -> bool:
    return any(matches(view, other.views) for other in definition.sinks if sink in {other.name, other.views_of})


def _without_effect(definition: Definition, consumer: Any, views: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield (number, reason) of each rule. consumer: a sink or a delivery. views: the names of its views."""
    rules = getattr(consumer, "rules", ())
    for number, rule in enumerate(rules):
        if _WILD & set(rule.match):
            continue
        earlier = next((one.match for one in rules[:number] if matches(rule.match, [one.match])), None)
        is_table = definition.captures(rule.match) and matches(rule.match, consumer.tables)
        if earlier is not None:
            yield number, f"the rule has no effect, because the rule {earlier!r} before it matches this table"
        elif not is_table and rule.match not in views:
            near = did_you_mean(rule.match, [*views, *(table.match for table in definition.tables)])
            yield number, f"the rule has no effect, because no captured table has this name{near}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question that names the most similar of the names, without globs; "" if none is similar."""
    near = get_close_matches(name, [one for one in names if not _WILD & set(one)], n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def _schema(glob: str) -> str | None:
    """Return the schema in a glob over `schema.table`; None if this part of the glob contains wildcards."""
    schema = glob.partition(".")[0]
    return None if _WILD & set(schema) else schema


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def with_target_columns(schema: TableSchema, settings: TableSettings | SearchSettings) -> TableSchema:
    """Return the table's schema with only the columns that the target has; ignore unknown names in the column lists."""
    wanted, unwanted = set(settings.column_list), set(settings.except_column_list)
    if not wanted and not unwanted:
        return schema
    columns = tuple(c for c in schema.columns if (not wanted or c.name in wanted) and c.name not in unwanted)
    return replace(schema, columns=columns)


def with_document_columns(schema: TableSchema, settings: SearchSettings) -> TableSchema:
    """Return the table's schema with only the columns that a search index has, before the transform of the rule."""
    selected = with_target_columns(schema, settings)
    if not settings.fields:
        return selected
    return replace(
        selected, columns=tuple(c for c in selected.columns if c.key is not None or c.name in settings.fields)
    )


def column_conflicts(
    schema: TableSchema, rule: SinkRule | SearchRule | None, settings: TableSettings | SearchSettings
) -> Iterator[KeyConflict]:
    """Yield all conflicts between a table and its settings that can be found without Spark.

    settings: the settings of the sink, overridden by those of the rule.
    """
    yield from unknown_columns(schema, rule)
    yield from left_out_key_columns(schema, settings)
    if isinstance(settings, TableSettings):
        yield from missing_key(schema, settings.history_mode)
    if rule is not None and rule.transform is not None:
        for key, error in transform_conflicts(rule.transform, with_target_columns(schema, settings)):
            yield KeyConflict(("transform", *key), error)


def unknown_columns(schema: TableSchema, rule: SinkRule | SearchRule | None) -> Iterator[KeyConflict]:
    """Yield a conflict for each name in the rule's column lists that the table does not have as a column."""
    known = {column.name for column in schema.sent}
    for name in _LISTS if rule is not None else ():
        for unknown in sorted(set(getattr(rule, name, ())) - known):
            message = f"{name}: table {schema.topic!r} has no column {unknown!r}"
            yield KeyConflict((name,), SchemaNotApplicable(message, remedy=CORRECT_RULE))


def left_out_key_columns(schema: TableSchema, settings: TableSettings | SearchSettings) -> Iterator[KeyConflict]:
    """Yield a conflict for each key column that the column lists exclude from the target."""
    if not settings.column_list and not settings.except_column_list:
        return
    there = {column.name for column in with_target_columns(schema, settings).columns}
    for name in (column.name for column in schema.key if column.name not in there):
        key = "except_column_list" if name in settings.except_column_list else "column_list"
        message = f"column {name!r} of table {schema.topic!r} is part of the key and cannot be excluded"
        yield KeyConflict((key,), SchemaNotApplicable(message, remedy=CORRECT_RULE))


def with_selected_columns(schema: TableSchema, settings: TableSettings | SearchSettings) -> TableSchema:
    """Return the table with only the columns that its settings select for the target.

    Raises SchemaNotApplicable if a key column is not selected. An unknown column name in the settings is no error here;
    see check_named.
    """
    raise_first(left_out_key_columns(schema, settings))
    return with_target_columns(schema, settings)


def check_named(schema: TableSchema, rule: SinkRule | SearchRule | None) -> None:
    """Raise SchemaNotApplicable if the rule of a table names a column that the table does not have."""
    raise_first(unknown_columns(schema, rule))


def raise_first(found: Iterator[KeyConflict]) -> None:
    """Raise the error of the first conflict, if there is one."""
    for conflict in found:
        raise conflict.error


def missing_key(schema: TableSchema, keeping: HistoryMode) -> Iterator[KeyConflict]:
    """Yield a conflict if the table has no key and its target needs a key to identify rows."""
    if keeping in {HistoryMode.VERSIONS, HistoryMode.MARKED} and not schema.key:
        message = f"table {schema.topic!r} has no key: {keeping.value!r} needs a key to identify rows"
        remedy = "use mode 'append' or the default mode, or add a primary key or a replica identity index at the source"
        yield KeyConflict(
            ("stored_as_scd_type" if keeping is HistoryMode.VERSIONS else "mode",),
            SchemaNotApplicable(message, remedy=remedy),
        )


def transform_conflicts(rule: Transform, schema: TableSchema) -> Iterator[KeyConflict]:
    """Yield the conflicts between a transform and a table: unknown columns, and key columns that would be lost.

    schema: the table with the target's columns, as `with_target_columns` returns it.
    """
    topic, known = schema.topic, {column.name for column in schema.sent}
    keys = {column.name for column in schema.key}
    for kind, named in (("drop", rule.drop), ("rename", rule.rename), ("mask", rule.mask)):
        for name in sorted(set(named) - known):
            message = f"{kind}: table {topic!r} has no column {name!r}, or the publication does not send this column"
            yield KeyConflict((kind,), TransformFailed(message))
        for name in sorted(keys & set(named)) if kind != "rename" else ():
            message = f"{kind}: column {name!r} of table {topic!r} is part of the key and cannot be dropped or masked"
            yield KeyConflict((kind,), TransformFailed(message))
    made = [column_name(rule.rename.get(name, name)).casefold() for name in known - set(rule.drop)]
    made += [name.casefold() for name in rule.computed]
    for name in sorted({name for name in made if made.count(name) > 1}):
        yield KeyConflict(
            (), TransformFailed(f"two columns of the target of table {topic!r} would have the name {name!r}")
        )
    if rule.needs_spark and not keys:
        message = f"table {topic!r} has no key: 'computed' and 'where' need a key to identify rows"
        yield KeyConflict(("computed" if rule.computed else "where",), TransformFailed(message))
