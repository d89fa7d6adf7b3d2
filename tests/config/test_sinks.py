"""Sinks of a definition: settings of a table by the first rule that matches, and the path of its target."""

from __future__ import annotations

import pytest

from cdc.config import DeltaSinkDefinition, SinkRule, TableSettings, TargetMode, table_settings
from cdc.config.sinks import HistoryMode, target_path
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
