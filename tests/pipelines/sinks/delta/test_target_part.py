"""Target part: the columns, files and identity that one table has in a target of its own or in a shared one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.config import SchemaChanges
from cdc.errors import SchemaNotApplicable
from cdc.table import Column
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.schema_evolution import ColumnChange, column_id
from pipelines.sinks.delta.target_layout import NewTarget, TargetLayout
from pipelines.sinks.delta.target_part import (
    SharedPart,
    SharedTable,
    WholeTarget,
    columns_of_part,
    delete_other_tables,
    merge_columns,
    shared_tables,
    with_ids,
)
from pipelines.types.families import TypePolicy
from pipelines.types.typed_rows import target_schema
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, column

RELATION = pa.field("_relation", pa.int64())
COLUMNS = target_schema(ORDERS, TypePolicy.EXACT).append(RELATION)
ITEMS = replace(ORDERS, relation=2, oid=2, name="items")


def columns_with(*columns: Column) -> pa.Schema:
    return target_schema(replace(ORDERS, columns=columns), TypePolicy.EXACT)


@pytest.fixture(name="shared")
def _shared(tmp_path: Path) -> DeltaTarget:
    """A shared target of shop.orders and shop.items."""
    layout = TargetLayout(("_relation",), is_shared=True)
    target = DeltaTarget.create(str(tmp_path / "all"), "log-1", NewTarget(ORDERS, COLUMNS, layout))
    for schema in (ORDERS, ITEMS):
        target.part_of(schema.relation).add_table(schema, COLUMNS)
    target.refresh()
    return target


def test_the_state_of_a_table_survives_its_json() -> None:
    state = SharedTable("shop.örders", {"id": 1}, 7)

    assert SharedTable.from_json(state.to_json()) == state


def test_each_table_of_a_shared_target_has_its_own_state(shared: DeltaTarget) -> None:
    orders, items = (shared.part_of(schema.relation) for schema in (ORDERS, ITEMS))
    orders.complete_generation(5)

    assert {relation: table.topic for relation, table in shared_tables(shared.all_columns).items()} == {
        ORDERS.relation: "shop.orders",
        2: "shop.items",
    }
    assert (orders.is_complete, items.is_complete) == (True, False)
    assert orders.app_id != items.app_id
    assert shared.part_of(9).relation is None
    assert [column_id(field) for field in items.columns][:3] == [b"1", b"2", b"3"]
    assert [column_id(field) for field in shared.all_columns][:3] == [None] * 3


def test_a_table_leaves_a_shared_target_with_its_state(shared: DeltaTarget) -> None:
    delete_other_tables(shared, {2})
    shared.refresh()

    assert list(shared_tables(shared.all_columns)) == [2]


def test_a_name_that_another_relation_had_is_refused(shared: DeltaTarget) -> None:
    again = replace(ORDERS, relation=9)
    with pytest.raises(SchemaNotApplicable, match=r"contains rows of table .shop.orders. as relation 16384"):
        shared.part_of(9).add_table(again, COLUMNS)


def test_a_condition_is_restricted_to_the_rows_of_the_part() -> None:
    files = pa.table({"path": ["a", "b"], "partition._relation": pa.array([7, 8], pa.int64())})

    assert (WholeTarget().where("x > 1"), WholeTarget().files(files)) == ("x > 1", files)
    assert SharedPart(7).where("x > 1 OR y") == "_relation = 7 AND (x > 1 OR y)"
    assert SharedPart(7).files(files)["path"].to_pylist() == ["a"]
    assert (WholeTarget().txn_id("id"), SharedPart(7).txn_id("id")) == ("id", "id/7")


def test_a_table_adds_the_columns_that_the_target_does_not_have() -> None:
    added, ids = merge_columns(columns_with(ID), columns_with(ID, ITEM), {}, "shop.items")

    assert ([field.name for field in added], ids) == (["item"], {"id": 1, "item": 2})
    assert column_id(added[0]) is None


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ((ID, replace(ITEM, name="article")), "renaming column 'item' to 'article' cannot be applied"),
        ((ID, replace(ITEM, id=9)), "column 'item' was dropped, and another column took its name"),
        ((ID, ITEM, column(8, "PRICE")), "already has column 'price' of type decimal128"),
        ((ID, ITEM, replace(PRICE, typmod=-1, type_oid=25, type_name="text")), "column 'price' has type string"),
    ],
)
def test_a_table_does_not_change_a_column_of_others(wanted: tuple[Column, ...], message: str) -> None:
    with pytest.raises(SchemaNotApplicable, match=message):
        merge_columns(COLUMNS, columns_with(*wanted), {"id": 1, "item": 2}, "shop.items")


def test_columns_have_the_ids_of_the_table_that_reads_them(shared: DeltaTarget) -> None:
    plain = shared.all_columns

    assert columns_of_part(plain, None) is plain
    assert columns_of_part(plain, 9) is plain
    assert column_id(columns_of_part(plain, 2).field("item")) == b"2"
    assert column_id(with_ids(plain, {"price": 8}).field("price")) == b"8"


def test_under_exception_a_new_column_of_a_shared_target_is_refused(shared: DeltaTarget) -> None:
    wider = columns_with(ID, ITEM, PRICE, column(4, "note")).append(RELATION)
    part = shared.part_of(2)
    with pytest.raises(SchemaNotApplicable, match=r"exception' forbids changes of columns .column 'note' was added"):
        part.evolve_columns(ColumnChange(wider, SchemaChanges.EXCEPTION, replaced=False, topic="shop.items"), 20)
    part.evolve_columns(ColumnChange(wider, SchemaChanges.EVOLVE, replaced=False, topic="shop.orders"), 20)

    assert column_id(part.columns.field("note")) == b"4"
