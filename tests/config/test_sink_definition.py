"""Contract of a sink's definition: what a kind of sink gets that says nothing of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cdc.config.sink_definition import SinkDefinition
from cdc.config.sink_rules import ColumnLists, Disagreement, KeyConflict, RuleOfTables
from cdc.table import ReplicaIdentity, TableSchema

ORDERS = TableSchema(
    relation=1, oid=1, schema="shop", name="orders", replica_identity=ReplicaIdentity.DEFAULT, columns=()
)


class Lists(SinkDefinition):
    """A sink with nothing but what every kind must have."""

    column_list: tuple[str, ...] = ()
    except_column_list: tuple[str, ...] = ()

    @property
    def selecting_lists(self) -> tuple[tuple[str, ...], ...]:
        """No list of columns."""
        return ()

    @property
    def kind(self) -> str:
        """Name of the kind."""
        return "lists"

    @property
    def product(self) -> str:
        """Name of the product."""
        return "lists"

    @property
    def location(self) -> str:
        """Where the targets are."""
        return "nowhere"

    def rule(self, topic: str) -> RuleOfTables | None:
        """No rules."""
        del topic
        return None

    def settings(self, topic: str) -> ColumnLists:
        """The settings of each table are those of the sink."""
        del topic
        return self

    def selected_columns(self, schema: TableSchema) -> TableSchema:
        """Every column."""
        return schema

    def conflicts(self, directories: Mapping[str, str]) -> Iterator[Disagreement]:
        """No conflicts."""
        del directories
        return iter(())

    def column_conflicts(self, schema: TableSchema) -> Iterator[KeyConflict]:
        """No conflicts."""
        del schema
        return iter(())


def test_a_kind_that_says_nothing_of_its_own_has_no_directory_no_history_and_no_spark() -> None:
    sink = Lists()

    assert (sink.directory, sink.own_directory) == ("", "")
    assert sink.target_path(ORDERS) is None
    assert sink.shared_path(ORDERS) is None
    assert sink.keeps_history is None
    assert not sink.nulled_columns(ORDERS)
    assert not sink.may_omit_columns("shop.orders")
    switches = sink.opens_with_spark, sink.rules_need_spark, sink.has_one_target, sink.only_the_driver_writes
    assert switches == (False, False, False, False)
    assert not sink.normalizes_json
    assert sink.unthrottled is sink
    assert sink.keys_of_views == {}
    assert sink.conflict_with_tables(sink) is None
