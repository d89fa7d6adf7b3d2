"""Settings of a Delta sink, from its definition: for the whole sink and for each of its tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cdc.config import DeadLetterSettings, SinkRule, TableSettings, rule_of, table_settings
from cdc.config.delta_sink import HistoryMode, TypeSettings, Unrepresentable, target_path
from cdc.table import TableSchema
from cdc.target_names import parked_uri, published_uri
from cdc.targets.hidden_columns import RulesOfTopic, table_rules
from cdc.targets.target_rule_changes import TargetRules
from pipelines.sinks.contract import NONE_PARKED
from pipelines.sinks.delta.maintenance import UpkeepSettings
from pipelines.types import ColumnPolicies, Policy, TypePolicy


class Writer(StrEnum):
    """The engine that writes the targets."""

    #: The indexed writer on the driver for small batches, and Spark for large ones and for what it cannot write.
    AUTO = "auto"
    #: The indexed writer on the driver, whatever the size.
    INDEXED = "indexed"
    #: The indexed writer on the driver, whatever the size; it writes data files again instead of deletion vectors.
    COPY_ON_WRITE = "copy-on-write"
    #: Spark, whatever the size.
    SPARK = "spark"


@dataclass(frozen=True, slots=True)
class DeltaSettings:
    """The settings of one Delta sink."""

    name: str
    path: str
    """Path template of the targets, with the placeholders `{schema}` and `{table}`."""
    writer: Writer = Writer.AUTO
    table: TableSettings = field(default_factory=TableSettings)
    """Settings of a table that no rule matches."""
    rules: tuple[SinkRule, ...] = ()
    record: str | None = None
    """Directory of the published record; None means `_cdc/published` next to the targets."""
    upkeep: UpkeepSettings = field(default_factory=UpkeepSettings)
    """How long published cuts are kept, and when the targets are maintained."""
    is_staged: bool = False
    """Whether the targets are staged: a replay builds them, then adds their files to the targets of the sink. Staged
    targets have no deletion vectors, because delta-rs cannot add a file with its vector.
    """
    index_folder: str | None = None
    """Local directory for the key indexes of the targets; None means a temporary directory."""
    max_rewrite: int = 0
    """Maximum bytes per second that merges may rewrite in one target before its batches wait; 0 means no limit."""

    _known: dict[str, TableSettings] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of `of`: topic → settings. Every batch reads them several times."""

    def of(self, topic: str) -> TableSettings:
        """Return the settings of one table."""
        if topic not in self._known:
            self._known[topic] = table_settings(topic, self.table, self.rules)
        return self._known[topic]

    def keeps_history(self, topic: str) -> bool:
        """Return whether the target of a table keeps more of a row than its latest state."""
        return self.of(topic).history_mode is not HistoryMode.LATEST

    def types_of(self, topic: str) -> Policy:
        """Return the policy that maps the Postgres types of one table to types of the target's columns."""
        return type_policy(self.of(topic))

    def uri_of(self, schema: TableSchema) -> str:
        """Return the path of the target of one table."""
        return target_path(self.path, self.rules, schema)

    def dead_letters_of(self, schema: TableSchema) -> DeadLetterSettings:
        """Return how many rows of a table may be parked: none for a table without a key, or with a transform in Python.

        A row is parked before the Python function changes it. So a parked row could show values that the function
        hides.
        """
        rule = rule_of(schema.topic, self.rules)
        hides = rule is not None and rule.transform is not None and rule.transform.python is not None
        return NONE_PARKED if hides or not schema.key else self.of(schema.topic).dead_letters

    @property
    def column_rules(self) -> RulesOfTopic:
        """The function that returns which columns the rule of a topic hides."""
        return table_rules(self.table, self.rules)

    @property
    def target_rules(self) -> TargetRules:
        """The settings and rules that decide which values the targets may contain."""
        return TargetRules(self.table, self.rules)

    def writer_of(self, topic: str) -> Writer:
        """Return the writer that the rule of a table sets; if it sets none, return the writer of the sink."""
        rule = rule_of(topic, self.rules)
        return self.writer if rule is None or rule.writer is None else Writer(rule.writer.value)

    def uses_index(self, schema: TableSchema) -> bool:
        """Return whether a table has a key and a writer with a key index; its target may still not support an index."""
        return bool(schema.key) and self.writer_of(schema.topic) is not Writer.SPARK

    def has_vectors(self, topic: str) -> bool:
        """Return whether the target of a table is created with deletion vectors."""
        changes_rows = self.of(topic).history_mode is not HistoryMode.CHANGES
        return self.writer_of(topic) in {Writer.AUTO, Writer.INDEXED} and not self.is_staged and changes_rows

    @property
    def record_uri(self) -> str:
        """The directory of the published record."""
        return self.record or published_uri(self.path)

    @property
    def parked_uri(self) -> str:
        """The directory of the parked rows."""
        return parked_uri(self.record_uri)

    def __post_init__(self) -> None:
        # the definition has its own enum, whose values are the same texts
        object.__setattr__(self, "writer", Writer(self.writer))


def type_policy(settings: TableSettings) -> Policy:
    """Return the policy that maps the Postgres types of a table with these settings to types of its target."""
    others = () if isinstance(settings.unrepresentable, Unrepresentable) else settings.unrepresentable
    columns = tuple(
        (name, _policy_of(settings.columns.get(name, settings.types), settings.unrepresentable_of(name)))
        for name in dict.fromkeys((*settings.columns, *others))
    )
    table = _policy_of(settings.types, settings.unrepresentable_of(""))
    return ColumnPolicies(table, columns) if columns else table


def _policy_of(types: TypeSettings, unrepresentable: Unrepresentable) -> TypePolicy:
    return TypePolicy.TEXT if types is TypeSettings.TEXT else _EXACT[unrepresentable]


_EXACT: Final = {
    Unrepresentable.PARK: TypePolicy.EXACT,
    Unrepresentable.NULL: TypePolicy.NULLED,
    Unrepresentable.TEXT: TypePolicy.LOSSLESS,
}
