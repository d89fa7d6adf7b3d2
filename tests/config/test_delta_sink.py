"""Delta sinks of a definition: settings of a table by the first rule that matches, and the path of its target."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.config import DeltaSinkDefinition, SinkRule, TableSettings, TargetMode, table_settings
from cdc.config.delta_sink import HistoryMode, target_path
from cdc.errors import TransformFailed
from cdc.table import Column, ReplicaIdentity, TableSchema


def delta(**settings: object) -> DeltaSinkDefinition:
    return DeltaSinkDefinition.model_validate({"type": "delta", "name": "lake", "path": "/lake/{table}", **settings})


def history_mode(sink: DeltaSinkDefinition, topic: str) -> HistoryMode:
    return table_settings(topic, sink, sink.rules).history_mode


def test_the_first_rule_that_matches_decides_the_history_mode_and_otherwise_the_sink() -> None:
    rules = [
        {"match": "shop.audit_*", "mode": "append"},
        {"match": "shop.*", "except_column_list": ["note"]},
        {"match": "*.*", "mode": "soft_delete"},
    ]
    sink = delta(stored_as_scd_type=2, column_list=["id", "name"], rules=rules)

    assert history_mode(sink, "shop.audit_2026") is HistoryMode.CHANGES
    assert history_mode(sink, "shop.orders") is HistoryMode.VERSIONS
    assert history_mode(sink, "ops.orders") is HistoryMode.MARKED
    assert history_mode(delta(), "ops.orders") is HistoryMode.LATEST
    assert table_settings("shop.audit_2026", sink, sink.rules).column_list == ("id", "name")


def test_a_key_of_a_rule_replaces_its_alternative_in_the_sink() -> None:
    sink = delta(column_list=["id"], rules=[{"match": "*.*", "except_column_list": ["note"]}])
    found = table_settings("shop.orders", sink, sink.rules)
    assert (found.column_list, found.except_column_list) == ((), ("note",))
    assert table_settings("shop.orders", TableSettings(mode=TargetMode.APPEND), ()).history_mode is HistoryMode.CHANGES


def table(name: str) -> TableSchema:
    """Table shop.<name> with one column."""
    columns = (Column(id=1, name="id", type_oid=23, type_name="integer", key=0),)
    return TableSchema(
        relation=1, oid=1, schema="shop", name=name, replica_identity=ReplicaIdentity.DEFAULT, columns=columns
    )


def test_the_path_of_a_target_is_that_of_its_rule_with_the_groups_of_the_pattern() -> None:
    rules = [
        SinkRule(match="shop.orders_*", pattern=r"shop\.orders_(?P<region>[a-z]+)", path="/lake/orders/{region}"),
        SinkRule(match="shop.items", path="/lake/parts/{schema}"),
    ]

    assert target_path("/lake/{schema}/{table}", rules, table("users")) == "/lake/shop/users"
    assert target_path("/lake/{schema}/{table}", rules, table("items")) == "/lake/parts/shop"
    assert target_path("/lake/{schema}/{table}", rules, table("orders_eu")) == "/lake/orders/eu"
    with pytest.raises(TransformFailed, match=r"does not match the table"):
        target_path("/lake/{schema}/{table}", rules, table("orders_1"))


def test_a_sink_needs_spark_to_be_opened_only_if_spark_writes_all_of_its_tables() -> None:
    assert delta(writer="spark").opens_with_spark
    assert not delta().opens_with_spark
    assert not delta(rules=[{"match": "*.*", "writer": "spark"}]).opens_with_spark


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        ({"writer": "spark"}, True),
        ({"transform": {"computed": {"cents": "amount * 100"}}}, True),
        ({"transform": {"where": "amount > 0"}}, True),
        ({"transform": {"drop": ["note"]}}, False),
        ({"partition_by": ["day"]}, False),
    ],
)
def test_a_rule_needs_spark_for_expressions_and_for_its_writer(rule: dict[str, object], needed: bool) -> None:
    assert delta(rules=[{"match": "shop.orders", **rule}]).rules_need_spark is needed


def test_without_throttle_nothing_limits_rewrites() -> None:
    assert delta(max_rewrite="1MiB").unthrottled.max_rewrite == 0


@pytest.mark.parametrize(
    ("settings", "tables"),
    [
        ({}, []),
        ({"stored_as_scd_type": 2}, ["shop.items", "shop.orders"]),
        ({"rules": [{"match": "shop.items", "mode": "append"}]}, ["shop.items"]),
        (
            {"mode": "append", "rules": [{"match": "shop.items", "mode": None, "stored_as_scd_type": 2}]},
            ["shop.items", "shop.orders"],
        ),
    ],
)
def test_history_is_kept_of_the_tables_that_settings_and_rules_name(
    settings: dict[str, object], tables: list[str]
) -> None:
    keeps_history = delta(**settings).keeps_history

    assert (keeps_history is None) is (not tables)
    assert [topic for topic in ("shop.items", "shop.orders") if keeps_history and keeps_history(topic)] == tables


def test_a_table_without_a_key_does_not_fit_a_target_that_finds_rows_by_key() -> None:
    keyless = replace(table("items"), columns=(Column(id=1, name="id", type_oid=23, type_name="integer", key=None),))

    (conflict,) = delta(mode="soft_delete").column_conflicts(keyless)

    assert conflict.key == ("mode",)
    assert "has no key" in conflict.error.message
    assert not [*delta(mode="append").column_conflicts(keyless)]


def test_only_tables_of_a_rule_with_merge_tables_share_a_target() -> None:
    sink = delta(rules=[{"match": "shop.orders_*", "path": "/lake/orders", "merge_tables": True}])

    assert sink.shared_path(table("orders_1")) == sink.target_path(table("orders_2")) == "/lake/orders"
    assert sink.shared_path(table("items")) is None


def test_the_views_of_a_sink_are_in_the_directory_of_its_tables() -> None:
    views = delta(tables=["shop.v"], views=["shop.v"], views_of="lake")

    assert (views.directory, views.own_directory) == ("/lake/{table}", "")
    assert views.conflict_with_tables(delta()) is None
    assert views.conflict_with_tables(delta(path="/other/{table}")) == "expected the path of sink 'lake'"
