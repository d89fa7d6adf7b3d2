"""Conflicts between two keys of a definition, whose single keys are already validated. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from cdc.config.definition import Definition, EngineChoice
from cdc.config.field_types import LONGEST_NAME, directories_overlap, fixed_part, is_remote, placeholders
from cdc.config.object_store import storage_keys
from cdc.config.sink_rules import WILDCARDS, Disagreement
from cdc.config.sinks import DefinedSink
from cdc.config.views import NAME_OF_VIEWS, Incremental, View
from cdc.config.yaml_document import Key
from cdc.errors import ViewError, ViewKeyNull, ViewOnlyRefreshed
from cdc.table import matches


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
    yield from _sinks(definition)
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
        elif message := sink.conflict_with_tables(tables):
            yield Disagreement(key, message)


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
        path = sink.own_directory
        if not path:
            continue
        names = placeholders(path)
        if "table" in names and "schema" not in names and (many_schemas or _schema(definition.patterns[0]) is None):
            yield Disagreement(key, "expected {schema} in the path: tables of different schemas can have the same name")
        root = fixed_part(path)
        for other, owner in taken.items():
            if directories_overlap(root, other):
                yield Disagreement(key, f"the path up to its first placeholder overlaps the directory of {owner}")
                break
        taken[root] = f"sink {sink.name!r}"


def _delivery_directories(definition: Definition) -> Iterator[Disagreement]:
    taken: dict[str, str] = {}
    for place, delivery in enumerate(definition.deliveries):
        if not delivery.own_directory:
            continue
        other = taken.setdefault(delivery.own_directory, delivery.name)
        if other != delivery.name:
            message = (
                f"deliveries {other!r} and {delivery.name!r} cannot share a directory: each has its progress there"
            )
            yield Disagreement(("deliveries", place, "path"), message)


def _sinks(definition: Definition) -> Iterator[Disagreement]:
    """Yield the conflicts inside of each sink, and of its rules with the directories of other sinks and of the log."""
    for place, sink in enumerate(definition.sinks):
        for key, message in sink.conflicts(_directories_of_others(definition, sink)):
            yield Disagreement(("sinks", place, *key), message)


def _directories_of_others(definition: Definition, sink: DefinedSink) -> dict[str, str]:
    """Return directory → owner, for the log and for all sinks but this one and the one of its views or tables."""
    directories = {
        fixed_part(other.own_directory): f"sink {other.name!r}"
        for other in definition.sinks
        if other is not sink and other.views_of != sink.name and sink.views_of != other.name and other.own_directory
    }
    directories[definition.log.path] = "the log"
    return directories


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


def driver_written_sinks_on_spark(definition: Definition) -> Iterator[Disagreement]:
    """Yield the sinks that executors cannot write, of a definition that sends every batch to Spark."""
    if definition.spark.engine is EngineChoice.SPARK:
        for sink in definition.sinks:
            if sink.only_the_driver_writes:
                message = f"executors cannot write sink {sink.name!r}: they fold its batches, the driver writes them"
                yield Disagreement(("spark", "engine"), message)


def _shows_view(definition: Definition, sink: str, view: str) -> bool:
    return any(matches(view, other.views) for other in definition.sinks if sink in {other.name, other.views_of})


def _without_effect(definition: Definition, consumer: Any, views: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield (number, reason) of each rule. consumer: a sink or a delivery. views: the names of its views."""
    rules = getattr(consumer, "rules", ())
    for number, rule in enumerate(rules):
        if WILDCARDS & set(rule.match):
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
    near = get_close_matches(name, [other for other in names if not WILDCARDS & set(other)], n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def _schema(glob: str) -> str | None:
    """Return the schema in a glob over `schema.table`; None if this part of the glob contains wildcards."""
    schema = glob.partition(".")[0]
    return None if WILDCARDS & set(schema) else schema
