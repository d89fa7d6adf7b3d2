"""Target rules: targets that were written under other rules than those of the definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from cdc.config import SinkRule, TableSettings
from cdc.errors import TargetRulesChanged
from cdc.targets.target_rule_changes import TargetRules
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink_parts import DeltaSinkParts
from tests.contracts.folded import ORDERS, column

MASKED = {"transform": {"mask": {"item": "redact"}}}


def rules_with(**rule: Any) -> TargetRules:
    """The rules of a sink with one rule; without keys, of a sink without rules."""
    return TargetRules(TableSettings(), (SinkRule.model_validate({"match": "shop.*", **rule}),) if rule else ())


def target_under(folder: Path, rules: TargetRules) -> DeltaTable:
    """The empty target that a sink creates under these rules."""
    settings = DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}", table=rules.settings, rules=rules.rules)
    targets = DeltaSinkParts.of(settings).targets
    targets.log_id = "log-1"
    return targets.open(ORDERS).table


def difference(table: DeltaTable, rules: TargetRules) -> str | None:
    found = rules.difference(table, ORDERS.topic, ORDERS)
    return None if found is None else found.message.partition("' ")[2]


@pytest.mark.parametrize("rule", [{}, MASKED, {"mode": "append"}, {"except_column_list": ["item"]}])
def test_a_target_follows_the_rules_under_which_it_was_created(tmp_path: Path, rule: dict[str, Any]) -> None:
    rules = rules_with(**rule)
    table = target_under(tmp_path, rules)

    assert difference(table, rules) is None
    assert rules.exposes(table, ORDERS.topic, ORDERS) is None


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, MASKED, "has rows that were written with another transform than its rule has now"),
        (MASKED, {}, "has rows that were written with another transform than its rule has now"),
        ({}, {"mode": "append"}, "was created with mode 'scd1': expected 'append'"),
        ({}, {"except_column_list": ["item"]}, "has column 'item', which its rule excludes"),
        ({"except_column_list": ["item"]}, {}, "has no column 'item', which its rule includes"),
        ({}, {"column_list": ["id", "price"]}, "has column 'item', which its rule excludes"),
    ],
)
def test_the_first_difference_is_named(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    assert difference(target_under(tmp_path, rules_with(**before)), rules_with(**after)) == message


@pytest.mark.parametrize(
    ("after", "exposed"),
    [
        (MASKED, "has rows that were written with another transform than its rule has now"),
        ({"except_column_list": ["item"]}, "has column 'item', which its rule excludes"),
        ({"transform": {"rename": {"item": "article"}}}, None),
        ({"mode": "append"}, None),
    ],
)
def test_only_a_rule_that_hides_data_makes_a_version_expose_it(
    tmp_path: Path, after: dict[str, Any], exposed: str | None
) -> None:
    assert rules_with(**after).exposes(target_under(tmp_path, rules_with()), ORDERS.topic, ORDERS) == exposed


def test_under_ignore_a_column_may_be_missing(tmp_path: Path) -> None:
    table = target_under(tmp_path, rules_with(except_column_list=["item"]))

    assert difference(table, rules_with(schema_changes="ignore")) is None


def test_a_renamed_column_is_known_by_its_id(tmp_path: Path) -> None:
    table = target_under(tmp_path, rules_with())
    renamed = replace(ORDERS, columns=tuple(replace(one, name=f"{one.name}_2") for one in ORDERS.columns))

    assert rules_with().difference(table, ORDERS.topic, renamed) is None
    wider = replace(ORDERS, columns=(*ORDERS.columns, column(9, "note")))
    found = rules_with().difference(table, ORDERS.topic, wider)
    assert found is not None
    assert "has no column 'note'" in found.message


def test_a_table_of_another_program_has_no_rules(tmp_path: Path) -> None:
    theirs = DeltaTable.create(str(tmp_path / "theirs"), target_under(tmp_path, rules_with()).schema())

    assert rules_with(**MASKED).difference(theirs, ORDERS.topic, ORDERS) is None


def test_a_column_that_is_left_out_now_stops_the_next_batch(tmp_path: Path) -> None:
    table = target_under(tmp_path, rules_with())
    present = pa.schema(table.schema().to_arrow())
    rules_with().check_left_out("uri", present, ORDERS)
    with pytest.raises(TargetRulesChanged, match="target 'uri' has column 'item', which its rule excludes"):
        rules_with(except_column_list=["item"]).check_left_out("uri", present, ORDERS)
