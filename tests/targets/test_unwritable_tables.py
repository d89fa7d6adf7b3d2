"""Sink preflight: tables that do not fit the rules or paths of the sinks of a definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from cdc.config import Definition, SearchRule
from cdc.targets.unwritable_tables import path_conflicts, rule_conflicts, tables_of_sinks
from tests.contracts.folded import ORDERS

ITEMS = replace(ORDERS, relation=2, oid=2, name="items")
OTHERS = replace(ORDERS, relation=3, oid=3, schema="stock", name="items")
TABLES = [ORDERS, ITEMS, OTHERS]


def definition_with(folder: Path, *rules: dict[str, Any], **sink: Any) -> Definition:
    """A definition with the sink `lake`, and a search sink before it."""
    lake = {"type": "delta", "name": "lake", "path": f"{folder}/{{schema}}/{{table}}", "rules": list(rules), **sink}
    find = {"type": "search", "name": "find", "path": f"{folder}/find"}
    return Definition.model_validate(
        {
            "name": "shop",
            "source": {"dsn": "postgresql://nobody@127.0.0.1:1/no"},
            "tables": [{"match": "*.*"}],
            "log": {"path": f"{folder}/log"},
            "sinks": [find, lake],
        }
    )


def conflicts(definition: Definition) -> dict[tuple[str | int, ...], str]:
    """Key → message of every path that a target cannot have."""
    return {one.key: one.error.message for one in path_conflicts(definition, TABLES, {"lake"}, "log-1")}


def test_a_sink_has_the_tables_that_it_selects(tmp_path: Path) -> None:
    definition = definition_with(tmp_path, {"match": "shop.items", "mode": "append"}, tables=["*.items"])
    received = list(tables_of_sinks(definition, TABLES, {"lake"}))

    assert [(table.number, table.schema.topic) for table in received] == [(1, "shop.items"), (1, "stock.items")]
    assert [table.number for table in tables_of_sinks(definition, TABLES, {"find"})] == [0, 0, 0]


def test_a_setting_is_named_in_its_rule_or_in_the_sink(tmp_path: Path) -> None:
    rule = {"match": "shop.items", "column_list": ["id"]}
    _, items, _ = tables_of_sinks(definition_with(tmp_path, rule), TABLES, {"lake"})

    assert items.key("column_list") == ("sinks", 1, "rules", 0, "column_list")
    assert items.key("types") == ("sinks", 1, "types")


def test_a_column_that_no_table_of_the_rule_has_is_a_mismatch(tmp_path: Path) -> None:
    definition = definition_with(tmp_path, {"match": "shop.orders", "except_column_list": ["nope"]})

    (found,) = rule_conflicts(definition, TABLES, {"lake"})
    assert found.key == ("sinks", 1, "rules", 0, "except_column_list")
    assert found.error.message == "except_column_list: table 'shop.orders' has no column 'nope'"


def test_a_column_that_a_search_sink_cannot_leave_out_is_a_mismatch(tmp_path: Path) -> None:
    definition = definition_with(tmp_path)
    find = definition.sinks[0].model_copy(
        update={
            "tables": ("*.items",),
            "rules": (SearchRule(match="shop.*", except_column_list=("id",), fields=("no",)),),
        }
    )
    definition = definition.model_copy(update={"sinks": (find,)})

    found = rule_conflicts(definition, TABLES, {"find"})
    assert {one.key: one.error.message for one in found} == {
        ("sinks", 0, "rules", 0, "fields"): "fields: table 'shop.items' has no column 'no'",
        ("sinks", 0, "rules", 0, "except_column_list"): (
            "column 'id' of table 'shop.items' is part of the key and cannot be excluded"
        ),
    }
    assert rule_conflicts(definition, TABLES, {"lake"}) == []


def test_free_paths_have_no_conflict(tmp_path: Path) -> None:
    assert conflicts(definition_with(tmp_path)) == {}


@pytest.mark.parametrize("merge", [True, False])
def test_tables_share_a_path_under_a_rule_that_merges_them(tmp_path: Path, merge: bool) -> None:
    path = {"path": f"{tmp_path}/all", "merge_tables": True} if merge else {"path": f"{tmp_path}/all/{{table}}"}
    found = conflicts(definition_with(tmp_path, {"match": "*.items", **path}))

    assert list(found) == ([] if merge else [("sinks", 1, "rules", 0, "path")])
    assert all("overlaps" in message for message in found.values())


def test_a_path_inside_another_target_is_a_conflict(tmp_path: Path) -> None:
    rules = ({"match": "shop.orders", "path": f"{tmp_path}/a"}, {"match": "shop.items", "path": f"{tmp_path}/a/b"})
    found = conflicts(definition_with(tmp_path, *rules))

    assert found == {
        ("sinks", 1, "rules", 1, "path"): f"the target of table 'shop.items' would be '{tmp_path}/a/b', which overlaps "
        f"'{tmp_path}/a', the target of table 'shop.orders'"
    }


def test_a_path_with_a_table_of_another_program_is_a_conflict(tmp_path: Path) -> None:
    write_deltalake(f"{tmp_path}/shop/items", pa.table({"id": [1]}))
    found = conflicts(definition_with(tmp_path))

    assert list(found) == [("sinks", 1, "path")]
    assert "table 'shop.items' cannot be written to its target" in found["sinks", 1, "path"]
