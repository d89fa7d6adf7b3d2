"""Merge source: folded rows as rows to merge, with base rows from a target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc.errors import MissingBase, SchemaNotApplicable
from cdc.table import TableState
from pipelines.sinks.delta.merge_source import (
    BaseLookup,
    has_no_base,
    is_after,
    key_numbers,
    keyless_source,
    latest_per_key,
    one_row_per_key,
    rows_with_keys,
    split_partial,
    table_source,
)
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.types.families import TypePolicy
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, column, folded, gone, part, put

SHAPE = RowShape(ORDERS, TypePolicy.EXACT)
KEYS = pa.table({"id": pa.array([1, 2], pa.int64())})


@pytest.fixture(name="table")
def _table(tmp_path: Path) -> DeltaTable:
    """A target with the rows 1, 2 and 3, at the positions 10, 11 and 12."""
    uri = str(tmp_path / "target")
    DeltaTable.create(uri, SHAPE.columns)
    write_deltalake(uri, SHAPE.rows(folded([put(1, "a", 10), put(2, "b", 11), put(3, "c", 12)])), mode="append")
    return DeltaTable(uri)


def merged(source: pa.Table) -> list[tuple[object, ...]]:
    return [(row["_op"], row["id"], row["item"]) for row in source.to_pylist()]


def test_a_partial_image_takes_unsent_columns_from_its_base_row(table: DeltaTable) -> None:
    images = folded([put(9, "z", 30), gone(3, 31), part(1, 32, {3: "2.00"}), part(7, 33, {3: "3.00"}, base=("2",))])

    assert merged(table_source(images, BaseLookup(lambda: table), SHAPE)) == [
        ("u", 9, "z"),
        ("d", 3, None),
        ("u", 1, "a"),
        ("u", 7, "b"),
    ]


def test_base_rows_are_found_by_an_index_that_has_them(table: DeltaTable) -> None:
    asked = list[tuple[list[int], list[str]]]()

    def find(keys: pa.Table, schema: pa.Schema) -> pa.Table | None:
        asked.append((keys["id"].to_pylist(), schema.names))
        rows = SHAPE.rows(folded([put(1, "indexed", 10)]))
        return None if keys.num_rows > 1 else rows.select(schema.names)

    bases = BaseLookup(lambda: table, find_rows=find)
    assert merged(table_source(folded([part(1, 32, {3: "2.00"})]), bases, SHAPE)) == [("u", 1, "indexed")]
    both = folded([part(1, 32, {3: "2.00"}), part(2, 33, {3: "2.00"})])
    assert merged(table_source(both, bases, SHAPE)) == [("u", 1, "a"), ("u", 2, "b")]
    assert [keys for keys, _ in asked] == [[1], [1, 2]]
    assert set(asked[0][1]) == set(SHAPE.columns.names)


def test_an_index_of_a_key_column_of_another_type_is_not_asked(tmp_path: Path) -> None:
    def find(keys: pa.Table, schema: pa.Schema) -> pa.Table | None:
        raise AssertionError((keys, schema))

    narrow = RowShape(
        replace(ORDERS, columns=(column(1, "id", "integer", oid=23, key=0), ITEM, PRICE)), TypePolicy.EXACT
    )
    write_deltalake(str(tmp_path), narrow.rows(folded([put(1, "a", 10)])))
    bases = BaseLookup(lambda: DeltaTable(str(tmp_path)), find_rows=find)
    assert narrow.columns.field("id").type != SHAPE.columns.field("id").type
    assert merged(table_source(folded([part(1, 32, {3: "2.00"})]), bases, SHAPE)) == [("u", 1, "a")]


def test_an_image_without_a_base_row_is_an_error_or_waits_for_the_copy(table: DeltaTable) -> None:
    images = folded([part(1, 30, {3: "2.00"}), part(9, 31, {3: "2.00"})])
    copying = replace(SHAPE, schema=replace(ORDERS, state=TableState.SNAPSHOTTING))

    with pytest.raises(MissingBase, match="no base row for 1 partial images, the first at 0/1F"):
        table_source(images, BaseLookup(lambda: table), SHAPE)
    assert merged(table_source(images, BaseLookup(lambda: table), copying)) == [("u", 1, "a")]
    assert has_no_base(images, BaseLookup(lambda: table), SHAPE).tolist() == [False, True]
    assert has_no_base(images, BaseLookup(lambda: table), copying).tolist() == [False, False]


def test_a_row_older_than_a_truncate_is_no_base(table: DeltaTable) -> None:
    images = folded([part(1, 30, {3: "2.00"}), part(3, 31, {3: "2.00"})])

    assert has_no_base(images, BaseLookup(lambda: table, truncated=(11, 0)), SHAPE).tolist() == [True, False]


def test_in_a_target_with_a_part_of_the_range_the_base_of_a_moved_row_is_uncertain(table: DeltaTable) -> None:
    images = folded([part(1, 30, {3: "2.00"}), part(7, 31, {3: "2.00"}, base=("2",))])

    assert has_no_base(images, BaseLookup(lambda: table, exact=False), SHAPE).tolist() == [False, True]


def test_only_upserts_with_unsent_columns_are_partial() -> None:
    complete, partial = split_partial(folded([put(1, "a", 10), part(2, 11, {}), gone(3, 12)]))

    assert (complete["position"].to_pylist(), partial["position"].to_pylist()) == ([10, 12], [11])


def test_rows_are_found_by_their_first_key_column(table: DeltaTable) -> None:
    assert sorted(rows_with_keys(table, KEYS, SHAPE.columns)["id"].to_pylist()) == [1, 2]
    assert rows_with_keys(table, KEYS, SHAPE.columns, "item = 'b'")["id"].to_pylist() == [2]
    assert rows_with_keys(table, KEYS.select([]), SHAPE.columns).num_rows == 3


def test_a_renamed_column_is_found_by_its_id(table: DeltaTable) -> None:
    renamed = replace(SHAPE, schema=replace(ORDERS, columns=(replace(ID, name="number"), ITEM, PRICE)))
    keys = KEYS.rename_columns(["number"])

    assert sorted(rows_with_keys(table, keys, renamed.columns)["number"].to_pylist()) == [1, 2]


def test_both_zeros_of_a_float_are_one_key() -> None:
    rows = pa.table(
        {
            "ratio": pa.array([0.0, -0.0, 1.0]),
            "_position": pa.array([10, 11, 5], pa.int64()),
            "_ordinal": pa.array([0, 0, 0], pa.int64()),
        }
    )
    first, second, other = key_numbers(rows.select(["ratio"]))

    assert first == second != other
    assert sorted(one_row_per_key(rows, ["ratio"])["_position"].to_pylist()) == [5, 11]


def test_the_latest_row_of_a_key_has_the_last_position_and_ordinal() -> None:
    rows = pa.table({"id": [1, 1, 1, 2], "_position": [10, 11, 11, 9], "_ordinal": [0, 1, 0, 0], "n": [0, 1, 2, 3]})

    assert sorted(latest_per_key(rows, ["id"])["n"].to_pylist()) == [1, 3]
    assert is_after(rows, (11, 0)).to_pylist() == [False, True, False, False]
    assert latest_per_key(rows.slice(0, 0), ["id"]).num_rows == 0


def test_without_a_key_a_delete_removes_one_equal_row(table: DeltaTable) -> None:
    bag = replace(SHAPE, schema=replace(ORDERS, columns=tuple(replace(c, key=None) for c in (ID, ITEM, PRICE))))
    images = folded([put(1, "a", 30), put(9, "z", 31)])
    images = images.set_column(images.column_names.index("op"), "op", pa.array(["d", "u"]))
    with pytest.raises(SchemaNotApplicable, match="was dropped within a batch"):
        keyless_source(images, table, bag, lenient=False)
    none = pa.nulls(2, images.schema.field("key").type)
    images = images.set_column(images.column_names.index("key"), "key", none)

    source = keyless_source(images, table, bag, lenient=False)
    assert [(row["_op"], row["_position"]) for row in source.to_pylist()] == [("u", 31), ("d", 10)]
    with pytest.raises(MissingBase):
        keyless_source(images, table, bag, (20, 0), lenient=False)
    assert np.array(keyless_source(images, table, bag, (20, 0), lenient=True)["_op"]).tolist() == ["u"]
