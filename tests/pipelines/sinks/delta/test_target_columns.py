"""Table plan: the columns, path and layout that the rules give a table, and names that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdc.config import SinkRule, TableSettings
from cdc.errors import SchemaNotApplicable, TransformFailed
from pipelines.sinks.delta.merge_source import BaseLookup, table_source
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.target_columns import POSITION_KEY, RowShape, TablePlans, rules_in_subdirectory
from pipelines.sinks.delta.target_layout import PLAIN
from pipelines.types.families import TypePolicy
from tests.contracts.folded import ORDERS, batch, column, folded, put
from tests.contracts.histories import SETTINGS, Lake
from tests.contracts.stories import history
from tests.pipelines.sinks.maintained_sink import LOG

NUMBER = column(3, "number", "double precision", oid=701)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"cluster_by": ["nope"]}, "cluster_by: the target of table 'shop.orders' has no column 'nope'"),
        (
            {"cluster_by": ["item", "number"]},
            "cluster_by: column 'number' .* has type double, but cluster_by needs a type",
        ),
    ],
)
def test_columns_that_cannot_be_meant_are_refused_before_anything_is_written(tmp_path: Path, rule, words):
    sink = DeltaSink(
        DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", rules=(SinkRule(match="shop.*", **rule),))
    )
    sink.open(LOG)
    table = replace(ORDERS, columns=(*ORDERS.columns[:2], NUMBER))
    with pytest.raises(TransformFailed, match=words):
        sink.apply(batch([replace(put(1, "a", 10), after={1: "1", 2: "a", 3: "1.5"})], 0, 20, table))

    assert not (tmp_path / "shop").exists()


def test_a_target_has_the_columns_that_are_listed_and_never_loses_its_key(tmp_path: Path) -> None:
    rows, positions = history(1, 6)
    lists: list[dict[str, Any]] = [{"column_list": ("id", "large")}, {"except_column_list": ("plain", "huge")}]
    for number, said in enumerate(lists):
        for keeping, settings in SETTINGS.items():
            lake = Lake(f"{tmp_path}/{number}{keeping}", settings.model_copy(update=said))
            lake.apply(rows, 0, positions[-1])
            assert {"id", "large"} == {name for name in lake.rows()[0] if not name.startswith("_")}
    with pytest.raises(SchemaNotApplicable, match="is part of the key and cannot be excluded"):
        Lake(f"{tmp_path}/key", TableSettings(except_column_list=("id",))).apply(rows, 0, positions[-1])


def test_a_name_in_a_rule_that_no_column_has_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    rows, positions = history(1, 2)
    for said in ("column_list", "except_column_list", "track_history_column_list", "track_history_except_column_list"):
        rule = SinkRule.model_validate(
            {"match": "t.*", "stored_as_scd_type": 2, said: ["nowhere"] if said != "column_list" else ["id", "nowhere"]}
        )
        lake = Lake(str(tmp_path), TableSettings(), rules=(rule,))
        with pytest.raises(SchemaNotApplicable, match=f"{said}: table .* has no column 'nowhere'"):
            lake.apply(rows, 0, positions[0])
        assert not Path(lake.uri).exists()


def test_a_path_belongs_to_one_table_unless_its_rule_merges_tables() -> None:
    rules = (SinkRule.model_validate({"match": "all.*", "path": "/all", "merge_tables": True}),)
    plans = TablePlans(rules)
    other = replace(ORDERS, relation=2, name="items")
    plans.claim_path("/lake/a", ORDERS)
    plans.claim_path("/lake/a", replace(ORDERS, relation=3))  # created again under its name
    for uri in ("/lake/a", "/lake/a/b", "/lake"):
        with pytest.raises(TransformFailed, match=f"path '{uri}' .* overlaps path '/lake/a'"):
            plans.claim_path(uri, other)
    plans.claim_path("/lake/ab", other)
    plans.claim_path("s3://b/lake/a/b", ORDERS)
    for uri in ("s3://b/lake/a", "s3://b", "s3://b/lake/a/b/c/d"):
        with pytest.raises(TransformFailed, match="overlaps path 's3://b/lake/a/b'"):
            plans.claim_path(uri, other)
    for relation in (4, 5):
        plans.claim_path("/all", replace(ORDERS, schema="all", relation=relation, name=f"t{relation}"))


def test_a_table_is_planned_once_for_each_of_its_versions() -> None:
    plans = TablePlans(())
    shape = plans.of(ORDERS, TypePolicy.EXACT)

    assert plans.of(replace(ORDERS), TypePolicy.EXACT) is shape
    assert plans.of(replace(ORDERS, name="other"), TypePolicy.EXACT) is not shape
    assert (shape.key, shape.columns.names) == (("id",), ["id", "item", "price", "_position", "_ordinal"])
    assert plans.layout(shape) == PLAIN


def test_rows_of_a_shared_target_carry_their_relation() -> None:
    rule = {"match": "shop.*", "path": "/all", "merge_tables": True, "partition_by": ["item"]}
    plans = TablePlans((SinkRule.model_validate(rule),))
    shape = plans.of(ORDERS, TypePolicy.EXACT)
    source = plans.finish_source(table_source(folded([put(1, "a", 10)]), BaseLookup(None), shape), shape)

    assert source["_relation"].to_pylist() == [ORDERS.relation]
    assert plans.layout(shape).partition_by == ("_relation", "item")
    assert shape.partition_texts == ("item",)


def test_a_table_without_a_key_is_found_by_position() -> None:
    keyless = replace(ORDERS, columns=tuple(replace(one, key=None) for one in ORDERS.columns))

    assert RowShape(keyless, TypePolicy.EXACT).key == POSITION_KEY


def test_a_stored_image_has_the_columns_of_the_target_masked_as_there() -> None:
    rule = {"match": "shop.*", "transform": {"drop": ["price"], "mask": {"item": "redact"}}}
    shape = TablePlans((SinkRule.model_validate(rule),)).of(ORDERS, TypePolicy.EXACT)
    found = shape.mask_image({1: "1", 2: "secret", 3: "1.00", 9: "unknown"})

    assert list(found) == [1, 2]
    assert found[1] == "1"
    assert "secret" not in str(found[2])


def test_the_rules_of_staged_targets_have_paths_in_a_subdirectory() -> None:
    rules = (SinkRule(match="a.*"), SinkRule.model_validate({"match": "b.*", "path": "/b/{table}"}))

    assert [rule.path for rule in rules_in_subdirectory(rules, "new")] == [None, "/b/{table}/new"]
