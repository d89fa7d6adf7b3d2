"""Contract of a sink's definition: what the rest of cdc asks a sink of a definition, whatever its kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Self

from cdc.config.field_types import Model
from cdc.config.sink_rules import ColumnLists, Disagreement, KeyConflict, RuleOfTables
from cdc.table import TableSchema


class SinkDefinition(Model, ABC):
    """What a definition says of one sink. Each kind of sink has a subclass with its keys.

    The defaults are those of a sink that keeps the latest state of every row in a target per table, in no directory of
    its own, and that needs no Spark.
    """

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the kind of sink; the tables of kinds find by it how its targets are read and written."""

    @property
    @abstractmethod
    def product(self) -> str:
        """Name of the product that stores the targets, as the page shows it."""

    @property
    @abstractmethod
    def location(self) -> str:
        """Where the targets are; together with the type it identifies the sink as a consumer of the log."""

    @abstractmethod
    def rule(self, topic: str) -> RuleOfTables | None:
        """Return the rule of the sink that applies to a table; None if no rule does."""

    @abstractmethod
    def settings(self, topic: str) -> ColumnLists:
        """Return the settings of one table: those of the sink, overridden by those of the table's rule."""

    @abstractmethod
    def selected_columns(self, schema: TableSchema) -> TableSchema:
        """Return the table with only the columns that its target has, before the transform of the rule."""

    @abstractmethod
    def conflicts(self, directories: Mapping[str, str]) -> Iterator[Disagreement]:
        """Yield the conflicts among the settings of the sink and of its rules, with keys relative to the sink.

        directories: directory → its owner, of all that is not in this sink.
        """

    @abstractmethod
    def column_conflicts(self, schema: TableSchema) -> Iterator[KeyConflict]:
        """Yield all conflicts between a table and its settings that can be found without Spark."""

    @property
    def directory(self) -> str:
        """Path of the directory with the targets, which may contain placeholders; empty if there is none."""
        return ""

    @property
    def own_directory(self) -> str:
        """The directory, unless the sink shares it with the sink of tables to which its views belong; then empty."""
        return self.directory

    @property
    def has_one_target(self) -> bool:
        """Whether all tables are in one target, so that a replay cannot replace single tables."""
        return False

    @property
    def only_the_driver_writes(self) -> bool:
        """Whether Spark's executors cannot write the target."""
        return False

    @property
    def opens_with_spark(self) -> bool:
        """Whether opening the sink requires a Spark session, because Spark writes all of its tables."""
        return False

    @property
    def rules_need_spark(self) -> bool:
        """Whether a table of the sink needs Spark even for small ranges."""
        return False

    @property
    def keeps_history(self) -> Callable[[str], bool] | None:
        """Function that says for a topic whether the sink keeps the history of the table; None: it does of none."""
        return None

    @property
    def normalizes_json(self) -> bool:
        """Whether the target shows json values in a normal form, not as the text of the source."""
        return False

    @property
    def unthrottled(self) -> Self:
        """The sink without a limit on rewritten bytes, so that no batch waits."""
        return self

    @property
    def keys_of_views(self) -> Mapping[str, str]:
        """The keys that differ in the sink of the views that belong to this sink."""
        return {}

    def conflict_with_tables(self, tables: SinkDefinition) -> str | None:  # noqa: ARG002 - most sinks are independent
        """Return why this sink of views cannot belong to a sink of tables of the same type; None if it can."""
        return None

    def target_path(self, schema: TableSchema) -> str | None:  # noqa: ARG002 - most sinks have none
        """Return the URI of the directory with the target of a table; None if it is in no directory of its own.

        Raises TransformFailed if the rule of the table gives it none.
        """
        return None

    def shared_path(self, schema: TableSchema) -> str | None:  # noqa: ARG002 - most sinks share none
        """Return the URI of the target that a table shares with others; None if it shares none."""
        return None

    def may_omit_columns(self, topic: str) -> bool:  # noqa: ARG002 - most sinks follow the table
        """Return whether the target of a table may be without columns that the source table got later."""
        return False

    def nulled_columns(self, schema: TableSchema) -> frozenset[int]:  # noqa: ARG002 - most sinks park such rows
        """Return the ids of the columns whose values are NULL in the target if their type cannot represent them."""
        return frozenset()
