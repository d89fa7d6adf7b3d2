"""Checks of the rules of a Delta sink: settings that the target could not have, found without Spark."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc.config import DeltaSinkDefinition
from pipelines.sinks.delta.rule_checks import rule_refusals
from tests.contracts.folded import ORDERS


def no_session() -> SparkSession:
    """No rule of these tests has an expression."""
    pytest.fail("Spark was started")


@pytest.mark.parametrize(
    ("rule", "keys"),
    [
        ({"partition_by": ["nothing"]}, [("partition_by",)]),
        ({"cluster_by": ["nothing"]}, [("cluster_by",)]),
        ({"partition_by": ["item"]}, []),
        ({"column_list": ["nothing"]}, []),  # reported without Spark
        ({"transform": {"python": "no_such_module:function"}}, [("transform", "python")]),
    ],
)
def test_a_setting_that_a_target_cannot_have_is_named(rule: dict[str, Any], keys: list[tuple[str, ...]]) -> None:
    sink = DeltaSinkDefinition.model_validate(
        {"type": "delta", "name": "lake", "path": "/lake/{table}", "rules": [{"match": "shop.orders", **rule}]}
    )

    assert [conflict.key for conflict in rule_refusals(sink, ORDERS, no_session)] == keys
