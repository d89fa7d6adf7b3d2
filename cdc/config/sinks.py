"""Sinks of a definition: what is derived from the log, where it is kept, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from cdc.config.model import Model
from cdc.config.names import Glob, Identifier, Location, Name, Share, Switch, invalid, placeholders
from cdc.config.transform import Transform
from cdc.config.units import Bytes, Seconds
from cdc.table import matches

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
"""Beginnings of properties that the sink decides: which columns and readers its tables have, and how long they last."""
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
"""Beginnings of properties that mean nothing without a table feature that delta-rs does not write."""


class WriterChoice(StrEnum):
    """Who merges into a Delta table."""

    #: Whichever is quicker by what merges took, and Spark's MERGE where delta-rs lacks the memory.
    AUTO = "auto"
    #: delta-rs on the driver, always.
    DELTA_RS = "delta-rs"
    #: Spark's MERGE, always.
    SPARK = "spark"


class TypeSettings(StrEnum):
    """How Postgres values become columns."""

    #: The nearest type that holds every value; one that does not fit is set aside, never changed.
    EXACT = "exact"
    #: Every column is text, exactly as Postgres prints it.
    TEXT = "text"


class SchemaChanges(StrEnum):
    """What becomes of a target whose table changed its columns; the words are those of Flink CDC."""

    #: The target follows exactly; of a change that it cannot follow without a new copy the table stops.
    EVOLVE = "evolve"
    #: As evolve; what it cannot follow so it follows as lenient does.
    TRY_EVOLVE = "try_evolve"
    #: Columns only come: one that is renamed, changed or made anew stays beside the new one, with what it held.
    LENIENT = "lenient"
    #: The target's columns stay as they are: new ones are left out, the others keep name and type.
    IGNORE = "ignore"
    #: The table stops at the first change.
    EXCEPTION = "exception"


class DroppedColumns(StrEnum):
    """What becomes of a target's column that the table has no more."""

    #: It stays with what it holds, null in rows that come.
    KEEP = "keep"
    #: It goes, with what it holds.
    DROP = "drop"


class HistoryMode(StrEnum):
    """What a target keeps of a row's past; the value stands in the target's property `cdc.mode`."""

    #: Nothing: the latest state of every key.
    LATEST = "scd1"
    #: Every version of a row, with where it began and ended.
    VERSIONS = "scd2"
    #: Every change.
    CHANGES = "append"
    #: The latest state of every key, of deleted ones as well.
    MARKED = "soft_delete"


class TargetMode(StrEnum):
    """What a target keeps of a row's past, where `stored_as_scd_type` does not say it."""

    #: Every change is a row: full history.
    APPEND = "append"
    #: The latest state of every key; a row that was deleted stays and says so.
    SOFT_DELETE = "soft_delete"


def _table_path(path: str) -> str:
    names = placeholders(path)
    if set(names) - {"schema", "table"}:
        raise invalid("a placeholder is neither {schema} nor {table}")
    if "table" not in names:
        raise invalid("expected {table} in the path, for every table has its own directory")
    return path


def _index_path(path: str) -> str:
    if set(placeholders(path)) - {"schema", "table"}:
        raise invalid("a placeholder is neither {schema} nor {table}")
    return path


def _routed_path(path: str) -> str:
    placeholders(path)
    return path


def _pattern(text: str) -> str:
    try:
        compiled = re.compile(text)
    except re.error as exc:
        raise invalid("character {place}: not a regular expression", place=(exc.pos or 0) + 1) from None
    if any(re.fullmatch("[a-z]+", name) is None or name in {"schema", "table"} for name in compiled.groupindex):
        raise invalid("expected groups called by letters a-z, other than schema and table")
    return text


def _property(name: str) -> str:
    if not name.startswith("delta.") or name.startswith(_OURS):
        raise invalid("expected a property of Delta that is not decided elsewhere: delta.<name>")
    if name.startswith(_FEATURED):
        raise invalid("expected a property without a table feature of its own, which targets are not made with")
    return name


class DeadLetterSettings(Model):
    """Rows that a target cannot take are parked with their key beside the sink, and everything else goes on."""

    stop_at: Annotated[int, Field(ge=0, le=10_000)] = 1_000
    """A table stops when more of its keys than this would be parked; 0: at the first row that it cannot take."""
    ratio: Share = 1.0
    """It stops as well when of the keys that a batch changes, 100 of them or more, a larger share would be parked."""


class TableSettings(Model):
    """How a Delta sink keeps one table: the sink says it for all of them, a rule for those it matches."""

    types: TypeSettings = TypeSettings.EXACT
    """How values become columns."""
    columns: Mapping[Identifier, TypeSettings] = {}
    """The same for single columns, by their names at the source; a name that a table does not have says nothing."""
    schema_changes: SchemaChanges = SchemaChanges.EVOLVE
    """What becomes of the target when the table changes its columns."""
    dropped_columns: DroppedColumns = DroppedColumns.KEEP
    """What becomes of a column that the table has no more, where the target follows and keeps the latest state."""
    stored_as_scd_type: Literal[1, 2] = 1
    """1: the latest state of every key. 2: every version of a row, with where it began and where it ended."""
    mode: TargetMode | None = None
    """Instead of stored_as_scd_type: every change as a row, or deleted rows kept and marked."""
    column_list: tuple[Identifier, ...] = ()
    """The source's columns that the target has, those of the key among them; default all."""
    except_column_list: tuple[Identifier, ...] = ()
    """Columns that it has not, instead of column_list."""
    track_history_column_list: tuple[Identifier, ...] = ()
    """Type 2: only a change of one of these columns begins a new version; default any column that is not of the key."""
    track_history_except_column_list: tuple[Identifier, ...] = ()
    """Type 2, instead of track_history_column_list: a change of these alone begins no new version."""
    dead_letters: DeadLetterSettings = DeadLetterSettings()
    """What becomes of rows that the target cannot take."""

    @property
    def keeping(self) -> HistoryMode:
        """What the target keeps of a row's past."""
        if self.mode is not None:
            return HistoryMode(self.mode.value)
        return HistoryMode.VERSIONS if self.stored_as_scd_type == 2 else HistoryMode.LATEST  # noqa: PLR2004 - as AUTO CDC counts


class SinkRule(TableSettings):
    """How tables that match are kept, as far as the sink as a whole does not say it."""

    match: Glob
    """Glob over `schema.table`; of all rules the first that matches a table counts for it."""
    transform: Transform | None = None
    """What becomes of the rows before they are in the target; default nothing."""
    pattern: Annotated[str, AfterValidator(_pattern)] | None = None
    """Regular expression over `schema.table`; its group `(?P<region>[a-z]+)` stands as `{region}` in `path`."""
    path: Annotated[Location, AfterValidator(_routed_path)] | None = None
    """Directory of the table instead of the sink's; `{schema}`, `{table}` and the groups of `pattern` are filled in."""
    merge_tables: Switch = False
    """Whether tables whose `path` comes out the same share one target, as the shards of one table do; each row is then
    known by its table and its key. Only for tables with a key, of which the latest state is kept."""
    partition_by: tuple[Identifier, ...] = ()
    """Columns of the target that its files are parted by, from its creation on."""
    cluster_by: tuple[Identifier, ...] = ()
    """Columns of the target that queries select rows by: upkeep puts rows in files so that few have to be opened."""
    properties: Mapping[Annotated[str, AfterValidator(_property)], str] = {}
    """Properties of the Delta table from its creation on, `delta.enableChangeDataFeed` for example; values are text.
    None that needs a feature which delta-rs does not write: type widening, row tracking, in-commit timestamps, …"""

    @model_validator(mode="after")
    def _routes(self) -> Self:
        groups = set(re.compile(self.pattern or "").groupindex)
        used = set(placeholders(self.path or ""))
        if unknown := used - groups - {"schema", "table"}:
            raise invalid("no group of the pattern is called {name}, as path has it", name=repr(min(unknown)))
        if self.merge_tables and self.path is None:
            raise invalid("merge_tables needs a path, where the tables of the rule are to come together")
        if self.pattern is not None and not used & groups:
            raise invalid("pattern is nothing for a rule whose path has none of its groups")
        if both := sorted(set(self.partition_by) & set(self.cluster_by)):
            raise invalid("cluster_by names {name}, by which partition_by parts the files already", name=repr(both[0]))
        return self


EXCLUSIVE_KEYS: Final = (
    frozenset({"stored_as_scd_type", "mode"}),
    frozenset({"column_list", "except_column_list"}),
    frozenset({"track_history_column_list", "track_history_except_column_list"}),
)
"""Of each of these one may be said; by a rule it takes the place of either said by the sink."""


def rule_of(topic: str, rules: Sequence[SinkRule]) -> SinkRule | None:
    """The rule that counts for a table, if there is one."""
    return next((rule for rule in rules if matches(topic, (rule.match,))), None)


def table_settings(topic: str, sink: TableSettings, rules: Sequence[SinkRule]) -> TableSettings:
    """How one table is kept: what its rule says, over what the sink says."""
    return settings_with_rule(sink, rule_of(topic, rules))


def settings_with_rule(sink: TableSettings, rule: SinkRule | None) -> TableSettings:
    """The settings of the tables of one rule; None: of those that no rule matches."""
    fields = TableSettings.model_fields.keys()
    own = {name: getattr(sink, name) for name in sink.model_fields_set & fields}
    said = {} if rule is None else {name: getattr(rule, name) for name in rule.model_fields_set & fields}
    replaced = {name for group in EXCLUSIVE_KEYS if group & said.keys() for name in group}
    own = {name: value for name, value in own.items() if name not in replaced}
    return TableSettings.model_construct(**(own | said))


class CutSettings(Model):
    """Past cuts of a sink, at each of which all its tables are read as they were together."""

    retain: Seconds = 86400.0
    """How long they are kept: each of the last minute, then the last one of every minute, later of every hour."""


class TargetUpkeep(Model):
    """How small files of the targets are put together, and when files that nobody needs are removed."""

    every: Seconds = 300.0
    """How often one table is looked at; 0: never, then somebody else looks after the targets."""
    vacuum_after: Seconds = 3600.0
    """How long a file stays that neither the newest version nor a kept cut needs, for queries that still read it."""
    keep_commits: Annotated[int, Field(ge=50)] = 100
    """How many of the newest commits stay in a table's Delta log in a directory: more for who streams from the table,
    although thousands make every batch slower."""


class DeltaSinkDefinition(TableSettings):
    """Delta tables, one per source table."""

    type: Literal["delta"]
    name: Name
    """Unique among the sinks of the pipeline."""
    path: Annotated[Location, AfterValidator(_table_path)]
    """Directory of each table; `{schema}` and `{table}` stand for its names."""
    tables: Annotated[tuple[Glob, ...], Field(min_length=1)] = ("*.*",)
    """Which of the captured tables; default all."""
    rules: tuple[SinkRule, ...] = ()
    """How single tables are kept; the first rule that matches counts, what it does not say is as said here."""
    writer: WriterChoice = WriterChoice.AUTO
    """Who merges."""
    max_rewrite: Bytes = 128 * 2**20
    """Bytes of one table's files that may be written again per second; above it batches become fewer. 0: no bound."""
    cuts: CutSettings = CutSettings()
    upkeep: TargetUpkeep = TargetUpkeep()


class SearchSinkDefinition(Model):
    """A search index over the rows of its tables."""

    type: Literal["search"]
    name: Name
    """Unique among the sinks of the pipeline."""
    engine: Literal["tantivy"] = "tantivy"
    """What indexes."""
    path: Annotated[Location, AfterValidator(_index_path)]
    """Directory of the index."""
    tables: Annotated[tuple[Glob, ...], Field(min_length=1)] = ("*.*",)
    """Which of the captured tables; default all."""
    fields: tuple[Identifier, ...] = ()
    """The columns whose words can be searched; default every column."""
    dead_letters: DeadLetterSettings = DeadLetterSettings()
    """What becomes of rows that the index cannot take."""


Sink = Annotated[DeltaSinkDefinition | SearchSinkDefinition, Field(discriminator="type")]
