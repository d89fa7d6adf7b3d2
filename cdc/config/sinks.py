"""Models of the sinks of a definition: Delta tables, search indexes, rules for single tables, and target paths."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cdc.config.field_types import Glob, Identifier, Location, Model, Name, Share, Switch, invalid, placeholders
from cdc.config.search_server import SearchServer
from cdc.config.transform import Transform
from cdc.config.units import Bytes, Seconds
from cdc.config.views import with_views
from cdc.errors import TransformFailed
from cdc.table import TableSchema, matches
from cdc.target_names import published_uri, target_uri

_OURS: Final = (
    "delta.checkpointInterval",
    "delta.columnMapping.",
    "delta.dataSkipping",
    "delta.deletedFileRetentionDuration",
    "delta.enableExpiredLogCleanup",
    "delta.feature.",
    "delta.logRetentionDuration",
    "delta.min",
)
"""Prefixes of table properties that only the sink sets, so a definition must not set them."""
_FEATURED: Final = (
    "delta.coordinatedCommits.",
    "delta.enableIcebergCompat",
    "delta.enableInCommitTimestamps",
    "delta.enableRowTracking",
    "delta.enableTypeWidening",
    "delta.enableVariantShredding",
    "delta.inCommitTimestamp",
    "delta.rowTracking.",
    "delta.universalFormat.",
)
"""Prefixes of table properties that need a table feature that delta-rs does not write."""


class WriterChoice(StrEnum):
    """Which engine merges changes into a Delta table."""

    #: The indexed writer where the table allows it; otherwise delta-rs or Spark, whichever is expected to be faster.
    AUTO = "auto"
    #: The indexed writer on the driver, and delta-rs for tables that it cannot write.
    INDEXED = "indexed"
    #: delta-rs on the driver, always.
    DELTA_RS = "delta-rs"
    #: Spark's MERGE, always.
    SPARK = "spark"


class TypeSettings(StrEnum):
    """How Postgres types map to column types."""

    #: The nearest type that can represent every value; a row with a value that does not fit is a dead letter.
    EXACT = "exact"
    #: Every column is text, as Postgres prints it.
    TEXT = "text"


class Unrepresentable(StrEnum):
    """What happens to a value that the type of its column in the target cannot represent."""

    #: The row is parked with its key until it can be merged.
    PARK = "park"
    #: The target has NULL instead; these values are counted. Values of a key, and arrays, are parked.
    NULL = "null"
    #: A column whose type cannot represent every value of Postgres is text, exactly as Postgres prints it.
    TEXT = "text"


def _null_as_text(given: object) -> object:
    """YAML reads the word null as no value."""
    return Unrepresentable.NULL.value if given is None else given


_Unrepresentable = Annotated[Unrepresentable, BeforeValidator(_null_as_text)]


class SchemaChanges(StrEnum):
    """How a target follows a change of the source table's columns; the names are those of Flink CDC."""

    #: Apply every change exactly; stop the table at a change that needs a new copy.
    EVOLVE = "evolve"
    #: As `evolve`, but apply a change that needs a new copy as `lenient` does.
    TRY_EVOLVE = "try_evolve"
    #: Only add columns: a column that was renamed, retyped or recreated keeps its values next to the new one.
    LENIENT = "lenient"
    #: Leave the target's columns unchanged: ignore new columns, keep names and types of the others.
    IGNORE = "ignore"
    #: Stop the table at the first change.
    EXCEPTION = "exception"


class IndexChanges(StrEnum):
    """How an index on a search server follows a change that its mapping cannot take."""

    #: Apply every change that the mapping can take; stop the table at another one.
    EVOLVE = "evolve"
    #: As `evolve`, but build a new index of the table from the log, next to the old one, instead of stopping.
    REBUILD = "rebuild"


class DroppedColumns(StrEnum):
    """What happens to a target's column after the source table dropped it."""

    #: Keep the column and its values; it is null in new rows.
    KEEP = "keep"
    #: Drop the column and its values.
    DROP = "drop"


class HistoryMode(StrEnum):
    """How much history of a row a target keeps; the value is stored in the target's property `cdc.mode`."""

    #: The latest state of every key.
    LATEST = "scd1"
    #: Every version of a row, with the positions at which the version began and ended.
    VERSIONS = "scd2"
    #: One row for every change.
    CHANGES = "append"
    #: The latest state of every key, including deleted rows, which are marked.
    MARKED = "soft_delete"


class TargetMode(StrEnum):
    """How much history of a row a target keeps; an alternative to `stored_as_scd_type`."""

    #: One row for every change: full history.
    APPEND = "append"
    #: The latest state of every key; deleted rows stay and are marked.
    SOFT_DELETE = "soft_delete"


def _table_path(path: str) -> str:
    names = placeholders(path)
    if set(names) - {"schema", "table"}:
        raise invalid("unknown placeholder: expected {schema} or {table}")
    if "table" not in names:
        raise invalid("expected {table} in the path, because every table has its own directory")
    return path


def _index_path(path: str) -> str:
    if set(placeholders(path)) - {"schema", "table"}:
        raise invalid("unknown placeholder: expected {schema} or {table}")
    return path


def _routed_path(path: str) -> str:
    placeholders(path)
    return path


def _pattern(text: str) -> str:
    try:
        compiled = re.compile(text)
    except re.error as exc:
        raise invalid("character {place}: the pattern is not a regular expression", place=(exc.pos or 0) + 1) from None
    if any(re.fullmatch("[a-z]+", name) is None or name in {"schema", "table"} for name in compiled.groupindex):
        raise invalid("invalid group name in the pattern: expected letters a-z, and neither 'schema' nor 'table'")
    return text


def _property(name: str) -> str:
    if not name.startswith("delta.") or name.startswith(_OURS):
        raise invalid("expected a property delta.<name> that the sink does not set itself")
    if name.startswith(_FEATURED):
        raise invalid("the property requires a table feature that targets do not have")
    return name


class DeadLetterSettings(Model):
    """Limits for dead letters: rows that a target rejects are stored with their key, and other rows are applied."""

    stop_at: Annotated[int, Field(ge=0, le=10_000)] = 1_000
    """Number of dead-letter keys of one table above which the table stops; 0 stops it at the first rejected row."""
    ratio: Share = 1.0
    """Share of the keys of a batch that may become dead letters; the table stops above it. Applies to batches of at
    least 100 keys. Default 1, no limit."""


class TableSettings(Model):
    """How a Delta sink stores a table. The keys of a sink apply to all its tables; the keys of a rule override them."""

    types: TypeSettings = TypeSettings.EXACT
    """How Postgres types map to column types: `exact` or `text`."""
    columns: Mapping[Identifier, TypeSettings] = {}
    """Type mapping of single columns, by their names at the source; unknown names are ignored."""
    unrepresentable: _Unrepresentable | Mapping[Identifier, _Unrepresentable] = Unrepresentable.PARK
    """What happens to infinite dates and times, years BC or after 9999, and NaN in a numeric with a precision: `park`,
    `null` or `text`; or one of these for single columns, by their names at the source."""
    schema_changes: SchemaChanges = SchemaChanges.EVOLVE
    """How the target follows a change of the table's columns: `evolve`, `try_evolve`, `lenient`, `ignore` or
    `exception`."""
    dropped_columns: DroppedColumns = DroppedColumns.KEEP
    """Whether the target keeps or drops a column that the source table dropped. `drop` requires a target that
    keeps only the latest state of every key, and `schema_changes: evolve` or `try_evolve`."""
    stored_as_scd_type: Literal[1, 2] = 1
    """1 keeps the latest state of every key. 2 keeps every version of a row, with the positions at which the version
    began and ended."""
    mode: TargetMode | None = None
    """Alternative to `stored_as_scd_type`: `append` writes one row for every change, `soft_delete` keeps and marks
    deleted rows."""
    column_list: tuple[Identifier, ...] = ()
    """Columns of the source that the target has; must include the key. Default all columns."""
    except_column_list: tuple[Identifier, ...] = ()
    """Columns of the source that the target does not have; alternative to `column_list`."""
    track_history_column_list: tuple[Identifier, ...] = ()
    """With SCD type 2: columns whose change begins a new version of a row. Default all columns outside the key."""
    track_history_except_column_list: tuple[Identifier, ...] = ()
    """With SCD type 2: columns whose change does not begin a new version; alternative to
    `track_history_column_list`."""
    dead_letters: DeadLetterSettings = DeadLetterSettings()
    """Limits for rows that the target rejects."""

    def unrepresentable_of(self, column: str) -> Unrepresentable:
        """What happens to a value of a column that its type in the target cannot represent."""
        if isinstance(self.unrepresentable, Unrepresentable):
            return self.unrepresentable
        return self.unrepresentable.get(column, Unrepresentable.PARK)

    @property
    def history_mode(self) -> HistoryMode:
        """How much history of a row the target keeps."""
        if self.mode is not None:
            return HistoryMode(self.mode.value)
        return HistoryMode.VERSIONS if self.stored_as_scd_type == 2 else HistoryMode.LATEST  # noqa: PLR2004 - as AUTO CDC counts


class SinkRule(TableSettings):
    """Settings for the tables that a glob matches; they override those of the sink."""

    match: Glob
    """Glob over `schema.table`; the first rule that matches a table applies to it."""
    transform: Transform | None = None
    """Transformation of the rows before they are written to the target; default none."""
    pattern: Annotated[str, AfterValidator(_pattern)] | None = None
    """Regular expression over `schema.table`. `path` can contain its groups: `(?P<region>[a-z]+)` as `{region}`."""
    path: Annotated[Location, AfterValidator(_routed_path)] | None = None
    """Directory of the target, instead of the sink's `path`; `{schema}`, `{table}` and the groups of `pattern` are
    replaced."""
    writer: WriterChoice | None = None
    """Engine that merges changes into these tables; default `writer` of the sink. Set `delta-rs` if an engine that
    queries the tables does not support deletion vectors."""
    merge_tables: Switch = False
    """Whether tables with the same resulting `path` share one target, for example the shards of one table. The key of a
    row then includes its table. Requires tables with a key, and a target that keeps only the latest state of every
    key."""
    partition_by: tuple[Identifier, ...] = ()
    """Partition columns of the target, set when it is created."""
    cluster_by: tuple[Identifier, ...] = ()
    """Columns by which queries filter; maintenance sorts rows into files by them, so that queries open few files."""
    properties: Mapping[Annotated[str, AfterValidator(_property)], str] = {}
    """Table properties of the Delta table, set when it is created, for example `delta.enableChangeDataFeed`; values are
    text. Properties that need a table feature which delta-rs does not write are rejected."""

    @model_validator(mode="after")
    def _routes(self) -> Self:
        groups = set(re.compile(self.pattern or "").groupindex)
        used = set(placeholders(self.path or ""))
        if unknown := used - groups - {"schema", "table"}:
            raise invalid(
                "'path' contains the placeholder {name}, but 'pattern' has no group of this name",
                name=repr(min(unknown)),
            )
        if self.merge_tables and self.path is None:
            raise invalid("'merge_tables' requires 'path', the directory of the shared target")
        if self.pattern is not None and not used & groups:
            raise invalid("'pattern' has no effect: 'path' contains none of its groups")
        if both := sorted(set(self.partition_by) & set(self.cluster_by)):
            raise invalid("'cluster_by' contains {name}, which is already in 'partition_by'", name=repr(both[0]))
        return self


EXCLUSIVE_KEYS: Final = (
    frozenset({"stored_as_scd_type", "mode"}),
    frozenset({"column_list", "except_column_list"}),
    frozenset({"track_history_column_list", "track_history_except_column_list"}),
)
"""Groups of keys; at most one key of a group may be set.

A rule that sets a key overrides the sink's settings of the whole group.
"""


AnyRule = TypeVar("AnyRule", bound="SinkRule | SearchRule")


def rule_of(topic: str, rules: Sequence[AnyRule]) -> AnyRule | None:
    """Return the first rule that matches the table; None if no rule does."""
    return next((rule for rule in rules if matches(topic, (rule.match,))), None)


def table_settings(topic: str, sink: TableSettings, rules: Sequence[SinkRule]) -> TableSettings:
    """Return the settings of one table: those of the sink, overridden by those of the table's rule."""
    return settings_with_rule(sink, rule_of(topic, rules))


def settings_with_rule(sink: TableSettings, rule: SinkRule | None) -> TableSettings:
    """Return the sink's settings, overridden by those of the rule; if `rule` is None, the sink's settings alone."""
    if rule is None and type(sink) is TableSettings:
        return sink
    return TableSettings.model_construct(**_overridden(TableSettings, sink, rule))


def _overridden(settings: type[Model], sink: Model, rule: Model | None) -> dict[str, Any]:
    """Return the keys of `settings` that the sink or the rule sets; those of the rule override those of the sink."""
    fields = settings.model_fields.keys()
    own = {name: getattr(sink, name) for name in sink.model_fields_set & fields}
    said = {} if rule is None else {name: getattr(rule, name) for name in rule.model_fields_set & fields}
    replaced = {name for group in EXCLUSIVE_KEYS if group & said.keys() for name in group}
    return {name: value for name, value in own.items() if name not in replaced} | said


def target_path(template: str, rules: Sequence[SinkRule], schema: TableSchema) -> str:
    """Return the URI of a table's target; raises TransformFailed if its rule's `pattern` does not match it."""
    rule = rule_of(schema.topic, rules)
    if rule is None or rule.path is None:
        return target_uri(template, schema.schema, schema.name)
    if rule.pattern is None:
        return target_uri(rule.path, schema.schema, schema.name)
    found = re.fullmatch(rule.pattern, schema.topic)
    groups = {} if found is None else found.groupdict()
    if found is None or not all(groups.values()):
        raise TransformFailed(
            f"table {schema.topic!r} has no target path: the pattern {rule.pattern!r} of its rule does not match the "
            "table, or a group of the pattern is empty"
        )
    return target_uri(rule.path, schema.schema, schema.name, groups)


class CutSettings(Model):
    """Retention of published cuts; all tables of a sink can be read consistently at each cut."""

    retain: Seconds = 86400.0
    """Age at which a cut is removed; default 1 day. Of the cuts older than a minute, only the last one in each minute
    is kept; of the cuts older than an hour, only the last one in each hour."""


class TargetUpkeep(Model):
    """Maintenance of target tables: compaction of small files and removal of unused files."""

    every: Seconds = 300.0
    """Interval between two runs on one table; default 5 minutes. 0 turns maintenance off, for targets that another tool
    maintains."""
    vacuum_after: Seconds = 3600.0
    """Time for which an unused file stays on disk, so that running queries can finish; default 1 hour. A file is unused
    if neither the latest version nor a cut needs it."""
    keep_commits: Annotated[int, Field(ge=50)] = 100
    """Number of the latest commits to keep in the Delta log of a target in a local directory. A streaming query that
    reads the target may need more; thousands of kept commits slow down every batch."""


class DeltaSinkDefinition(TableSettings):
    """A sink of Delta tables, one per source table."""

    type: Literal["delta"]
    name: Name
    """Name of the sink, unique in the pipeline."""
    path: Annotated[Location, AfterValidator(_table_path)]
    """Directory of each target; `{schema}` and `{table}` are replaced by the names of the source table."""
    tables: Annotated[tuple[Glob, ...], Field(min_length=1)] = ("*.*",)
    """Globs over `schema.table` of the captured tables that go to this sink; default all."""
    views: tuple[Glob, ...] = ()
    """Globs over `schema.table` of the views that go to this sink; default none. Without `tables`, the sink has no
    tables. With both, the views are in a sink of their own, NAME_views."""
    views_of: Name | None = None
    """Sink of tables to which this sink of views belongs. cdc sets it for a sink that has tables and views."""
    rules: tuple[SinkRule, ...] = ()
    """Settings for single tables. The first rule that matches a table applies; settings that the rule leaves out are
    taken from the sink."""
    writer: WriterChoice = WriterChoice.AUTO
    """Engine that merges changes: `auto`, `indexed`, `delta-rs` or `spark`."""
    max_rewrite: Bytes = 128 * 2**20
    """Bytes of one table's files that merges may rewrite per second; above this rate batches become larger and fewer.
    Default 128 MiB; 0 means no limit."""
    cuts: CutSettings = CutSettings()
    upkeep: TargetUpkeep = TargetUpkeep()

    @property
    def record_uri(self) -> str:
        """URI of the Delta table with the published cuts of the sink."""
        return published_uri(self.path, with_tables=self.views_of is not None)

    @model_validator(mode="after")
    def _views_or_tables(self) -> Self:
        return with_views(self, may_have_both=True)


class SearchSettings(Model):
    """Which columns a search sink stores. The keys of a sink apply to all its tables; those of a rule override them."""

    column_list: tuple[Identifier, ...] = ()
    """Columns of the source that are selected for the index; must include the key. Default all columns."""
    except_column_list: tuple[Identifier, ...] = ()
    """Columns of the source that the index does not have; alternative to `column_list`."""
    fields: tuple[Identifier, ...] = ()
    """Columns of the source that the index has besides the key; default every selected column. The words of those that
    are text can be searched; the others are only stored. A masked column is text."""


class SearchRule(SearchSettings):
    """Settings for the tables that a glob matches; they override those of the search sink."""

    match: Glob
    """Glob over `schema.table`; the first rule that matches a table applies to it."""
    transform: Transform | None = None
    """Transformation of the rows before they are written to the index; default none. `computed` and `where` are not
    possible."""


class SearchSinkDefinition(SearchSettings):
    """A sink that is a full-text search index over the rows of its tables."""

    type: Literal["search"]
    name: Name
    """Name of the sink, unique in the pipeline."""
    engine: Literal["tantivy", "opensearch", "elasticsearch"] = "tantivy"
    """Search engine: `tantivy` keeps one index in a local directory; the others are servers with an index per table."""
    path: Annotated[Location, AfterValidator(_index_path)] = ""
    """Local directory of the index; only for engine `tantivy`, which requires it."""
    server: SearchServer | None = None
    """Access to the server; only for the engines `opensearch` and `elasticsearch`, which require it."""
    schema_changes: IndexChanges = IndexChanges.EVOLVE
    """What happens at a change that the mapping of a table's index cannot take, such as another type of a column:
    `evolve` stops the table, `rebuild` builds a new index of the table from the log while searches use the old one.
    `rebuild` is only for engines with a server."""
    tables: Annotated[tuple[Glob, ...], Field(min_length=1)] = ("*.*",)
    """Globs over `schema.table` of the captured tables that go to this sink; default all."""
    views: tuple[Glob, ...] = ()
    """Globs over `schema.table` of the views that go to this sink; default none. Without `tables`, the sink has no
    tables. With both, the views are in a sink of their own, NAME_views."""
    views_of: Name | None = None
    """Sink of tables to which this sink of views belongs. cdc sets it for a sink that has tables and views."""
    rules: tuple[SearchRule, ...] = ()
    """Settings for single tables. The first rule that matches a table applies; settings that the rule leaves out are
    taken from the sink."""
    dead_letters: DeadLetterSettings = DeadLetterSettings()
    """Limits for rows that the index rejects."""

    @model_validator(mode="after")
    def _place(self) -> Self:
        wanted, other = ("path", "server") if self.engine == "tantivy" else ("server", "path")
        if not getattr(self, wanted):
            raise invalid("engine {engine} requires the key {key}", engine=self.engine, key=repr(wanted))
        if getattr(self, other):
            raise invalid("engine {engine} has no key {key}", engine=self.engine, key=repr(other))
        if self.engine == "tantivy" and self.schema_changes is IndexChanges.REBUILD:
            raise invalid("'schema_changes: rebuild' requires engine opensearch or elasticsearch")
        return with_views(self, may_have_both=True)

    @property
    def location(self) -> str:
        """Where the index is: a local directory, or the URL of the server with the alias of its indexes."""
        return self.path if self.server is None else f"{self.server.url}/{self.server.index}"

    @property
    def access(self) -> SearchServer:
        """The access to the server. Raises ValueError for an engine without a server."""
        if self.server is None:
            raise ValueError(f"sink {self.name!r} has engine {self.engine!r}: expected a search server")
        return self.server


def search_settings(topic: str, sink: SearchSettings, rules: Sequence[SearchRule]) -> SearchSettings:
    """Return the settings of one table in a search sink: those of the sink, overridden by those of the table's rule."""
    return SearchSettings.model_construct(**_overridden(SearchSettings, sink, rule_of(topic, rules)))


def search_fingerprint(topic: str, sink: SearchSettings, rules: Sequence[SearchRule]) -> str:
    """Return the hash of everything that decides which values a search sink stores of a table.

    The hash is keyed with the salt of the table's transform. If it changes, the stored documents have to follow.
    """
    rule = rule_of(topic, rules)
    transform = None if rule is None else rule.transform
    settings = search_settings(topic, sink, rules).model_dump(mode="json")
    text = json.dumps([settings, "" if transform is None else transform.fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


Sink = Annotated[DeltaSinkDefinition | SearchSinkDefinition, Field(discriminator="type")]


def has_tables_and_views(sink: DeltaSinkDefinition | SearchSinkDefinition) -> bool:
    """Whether a sink, as a definition file has it, receives tables and views."""
    return bool(sink.views) and sink.tables != sink.views


def name_of_views(sink: DeltaSinkDefinition | SearchSinkDefinition) -> str:
    """Return the name of the sink with the views of a sink that has tables, too."""
    return f"{sink.name}_views"


def with_views_apart(
    sinks: Sequence[DeltaSinkDefinition | SearchSinkDefinition],
) -> tuple[DeltaSinkDefinition | SearchSinkDefinition, ...]:
    """Return the sinks, with the views of each one that has tables in a sink of their own at the end.

    Tables and views come from two logs, so each part has a position, a published record and parked rows of its own.
    """
    tables = [sink.model_copy(update={"views": ()}) if has_tables_and_views(sink) else sink for sink in sinks]
    return (*tables, *(_views_of(sink) for sink in sinks if has_tables_and_views(sink)))


def _views_of(sink: DeltaSinkDefinition | SearchSinkDefinition) -> DeltaSinkDefinition | SearchSinkDefinition:
    changes: dict[str, Any] = {"name": name_of_views(sink), "tables": sink.views, "views_of": sink.name}
    if isinstance(sink, SearchSinkDefinition) and sink.path:
        changes["path"] = f"{sink.path.rstrip('/')}_views"  # a local index has one writer
    return sink.model_copy(update=changes)
