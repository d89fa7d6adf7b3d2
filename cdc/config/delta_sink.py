"""Definition of a sink of Delta tables: its keys, its rules for single tables, and the paths of its targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from cdc.config.field_types import (
    Glob,
    Identifier,
    Location,
    Model,
    Name,
    Switch,
    directories_overlap,
    fixed_part,
    invalid,
    placeholders,
)
from cdc.config.sink_definition import SinkDefinition
from cdc.config.sink_rules import (
    EXCLUSIVE_KEYS,
    WILDCARDS,
    DeadLetterSettings,
    Disagreement,
    KeyConflict,
    column_conflicts,
    exclusive_keys,
    overridden,
    rule_of,
    with_target_columns,
)
from cdc.config.transform import Transform
from cdc.config.units import Bytes, Seconds
from cdc.config.views import with_views
from cdc.config.yaml_document import Key
from cdc.errors import SchemaNotApplicable, TransformFailed
from cdc.table import TableSchema
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

    #: The indexed writer on the driver for small batches, and Spark for large ones and for tables that only it writes.
    AUTO = "auto"
    #: The indexed writer on the driver, always.
    INDEXED = "indexed"
    #: The indexed writer on the driver, always; it writes data files again instead of deletion vectors.
    COPY_ON_WRITE = "copy-on-write"
    #: Spark's MERGE, always.
    SPARK = "spark"


_EARLIER_NAME: Final = "delta-rs"
"""The name that the writer `copy-on-write` had while delta-rs merged for it."""


def _present_name(given: object, info: ValidationInfo) -> object:
    """Return the present name of a writer, with an advice if the definition has the earlier one."""
    if given != _EARLIER_NAME:
        return given
    name = WriterChoice.COPY_ON_WRITE.value
    (info.context or {}).get("advice", []).append((_EARLIER_NAME, f"the writer has another name now: write '{name}'"))
    return name


_Writer = Annotated[WriterChoice, BeforeValidator(_present_name)]


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

    @property
    def selecting_lists(self) -> tuple[tuple[str, ...], ...]:
        """Lists of columns; the target has only columns that are in each list that is not empty."""
        return (self.column_list,)

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
    writer: _Writer | None = None
    """Engine that merges changes into these tables; default `writer` of the sink. Set `copy-on-write` if an engine that
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


class DeltaSinkDefinition(TableSettings, SinkDefinition):
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
    writer: _Writer = WriterChoice.AUTO
    """Engine that merges changes: `auto`, `indexed`, `copy-on-write` or `spark`."""
    max_rewrite: Bytes = 128 * 2**20
    """Bytes of one table's files that merges may rewrite per second; above this rate batches become larger and fewer.
    Default 128 MiB; 0 means no limit."""
    cuts: CutSettings = CutSettings()
    upkeep: TargetUpkeep = TargetUpkeep()

    @property
    def record_uri(self) -> str:
        """URI of the Delta table with the published cuts of the sink."""
        return published_uri(self.path, with_tables=self.views_of is not None)

    @property
    def kind(self) -> str:
        """See SinkDefinition.kind."""
        return self.type

    @property
    def product(self) -> str:
        """See SinkDefinition.product."""
        return self.type

    @property
    def location(self) -> str:
        """See SinkDefinition.location."""
        return self.path

    @property
    def directory(self) -> str:
        """See SinkDefinition.directory."""
        return self.path

    @property
    def own_directory(self) -> str:
        """See SinkDefinition.own_directory."""
        return "" if self.views_of else self.path

    @property
    def opens_with_spark(self) -> bool:
        """See SinkDefinition.opens_with_spark."""
        return self.writer is WriterChoice.SPARK

    @property
    def rules_need_spark(self) -> bool:
        """See SinkDefinition.rules_need_spark: a rule has expressions or writer `spark`."""
        return any(
            rule.writer is WriterChoice.SPARK or (rule.transform or Transform()).needs_spark for rule in self.rules
        )

    @property
    def keeps_history(self) -> Callable[[str], bool] | None:
        """See SinkDefinition.keeps_history."""
        of_rules = (settings_with_rule(self, rule).history_mode for rule in (None, *self.rules))
        if all(mode is HistoryMode.LATEST for mode in of_rules):
            return None
        return lambda topic: self.settings(topic).history_mode is not HistoryMode.LATEST

    @property
    def unthrottled(self) -> Self:
        """See SinkDefinition.unthrottled."""
        return self.model_copy(update={"max_rewrite": 0})

    def rule(self, topic: str) -> SinkRule | None:
        """See SinkDefinition.rule."""
        return rule_of(topic, self.rules)

    def settings(self, topic: str) -> TableSettings:
        """See SinkDefinition.settings."""
        return table_settings(topic, self, self.rules)

    def selected_columns(self, schema: TableSchema) -> TableSchema:
        """See SinkDefinition.selected_columns."""
        return with_target_columns(schema, self.settings(schema.topic))

    def conflict_with_tables(self, tables: SinkDefinition) -> str | None:
        """See SinkDefinition.conflict_with_tables."""
        return None if self.path == tables.location else f"expected the path of sink {self.views_of!r}"

    def conflicts(self, directories: Mapping[str, str]) -> Iterator[Disagreement]:
        """See SinkDefinition.conflicts."""
        yield from _kept(self, self, ())
        for number, rule in enumerate(self.rules):
            key: Key = ("rules", number)
            meant = settings_with_rule(self, rule)
            yield from _kept(rule, meant, key)
            if rule.merge_tables:
                yield from _merged(meant, (*key, "merge_tables"))
        yield from _routes(self.rules, directories)

    def column_conflicts(self, schema: TableSchema) -> Iterator[KeyConflict]:
        """See SinkDefinition.column_conflicts."""
        settings = self.settings(schema.topic)
        yield from column_conflicts(schema, self.rule(schema.topic), settings)
        yield from missing_key(schema, settings.history_mode)

    def target_path(self, schema: TableSchema) -> str:
        """See SinkDefinition.target_path."""
        return target_path(self.path, self.rules, schema)

    def shared_path(self, schema: TableSchema) -> str | None:
        """See SinkDefinition.shared_path."""
        rule = self.rule(schema.topic)
        return None if rule is None or not rule.merge_tables else self.target_path(schema)

    def may_omit_columns(self, topic: str) -> bool:
        """See SinkDefinition.may_omit_columns."""
        return self.settings(topic).schema_changes is SchemaChanges.IGNORE

    def nulled_columns(self, schema: TableSchema) -> frozenset[int]:
        """See SinkDefinition.nulled_columns."""
        settings = self.settings(schema.topic)
        columns = (column for column in schema.sent if column.key is None)
        return frozenset(c.id for c in columns if settings.unrepresentable_of(c.name) is Unrepresentable.NULL)

    @model_validator(mode="after")
    def _views_or_tables(self) -> Self:
        return with_views(self, may_have_both=True)


def table_settings(topic: str, sink: TableSettings, rules: Sequence[SinkRule]) -> TableSettings:
    """Return the settings of one table: those of the sink, overridden by those of the table's rule."""
    return settings_with_rule(sink, rule_of(topic, rules))


def settings_with_rule(sink: TableSettings, rule: SinkRule | None) -> TableSettings:
    """Return the sink's settings, overridden by those of the rule; if `rule` is None, the sink's settings alone."""
    if rule is None and type(sink) is TableSettings:
        return sink
    return TableSettings.model_construct(**overridden(TableSettings, sink, rule))


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


_MERGED_CHANGES: Final = frozenset({SchemaChanges.EVOLVE, SchemaChanges.EXCEPTION})
"""Schema-change policies that a shared target (`merge_tables`) supports.

All source tables of a shared target must have the same columns.
"""
_FOLLOWING: Final = frozenset({SchemaChanges.EVOLVE, SchemaChanges.TRY_EVOLVE})
"""Schema-change policies under which a target can drop a column."""
_OF_COLUMNS: Final = frozenset({"dropped_columns", "schema_changes", "merge_tables", "transform", *EXCLUSIVE_KEYS[0]})
"""Keys that can conflict with `dropped_columns: drop`."""


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
    yield from exclusive_keys(said, key)
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


def _routes(rules: Sequence[SinkRule], directories: Mapping[str, str]) -> Iterator[Disagreement]:
    """Yield a conflict for each rule with a target whose directory can overlap another directory.

    The other directory can belong to another target of the rule, to another rule, or to one of `directories`.
    """
    for number, rule in enumerate(rules):
        key: Key = ("rules", number, "path")
        if rule.path is None:
            continue
        whole = not placeholders(rule.path)
        one = not set(placeholders(rule.path)) - {"schema"}
        if WILDCARDS & set(rule.match) and one and not rule.merge_tables:
            yield Disagreement(
                key,
                "expected {table} or a capture group of 'pattern' in the path: several tables can share a "
                "directory only with merge_tables: true",
            )
        elif owner := _owner_of(fixed_part(rule.path), directories):
            yield Disagreement(key, f"the path up to its first placeholder overlaps the directory of {owner}")
        elif whole and any(other.path and directories_overlap(other.path, rule.path) for other in rules[:number]):
            yield Disagreement(key, "overlaps the directory of another rule: every table needs its own directory")


def _owner_of(path: str, directories: Mapping[str, str]) -> str | None:
    return next((owner for directory, owner in directories.items() if directories_overlap(path, directory)), None)


def missing_key(schema: TableSchema, keeping: HistoryMode) -> Iterator[KeyConflict]:
    """Yield a conflict if the table has no key and its target needs a key to identify rows."""
    if keeping in {HistoryMode.VERSIONS, HistoryMode.MARKED} and not schema.key:
        message = f"table {schema.topic!r} has no key: {keeping.value!r} needs a key to identify rows"
        remedy = "use mode 'append' or the default mode, or add a primary key or a replica identity index at the source"
        yield KeyConflict(
            ("stored_as_scd_type" if keeping is HistoryMode.VERSIONS else "mode",),
            SchemaNotApplicable(message, remedy=remedy),
        )
