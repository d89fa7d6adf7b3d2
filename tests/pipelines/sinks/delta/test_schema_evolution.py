"""What a target becomes when its table changed (schema_evolution.py), over every pair of small tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pyarrow as pa
import pytest

from cdc.config import SchemaChanges
from cdc.errors import SchemaNotApplicable
from pipelines.sinks.delta.schema_evolution import (
    ColumnChange,
    EvolutionPlan,
    column_id,
    plan,
    sources,
    with_target_types,
)
from pipelines.types.families import TypePolicy
from pipelines.types.typed_rows import target_schema
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, column

INT = ("integer", 23)
LONG = ("bigint", 20)
POLICIES = list(SchemaChanges)


def tables() -> Iterator[pa.Schema]:
    """Every table of up to two of three columns, called `a` and `b`, each of a type or its wider one."""
    for count in range(3):
        for ids, names in product(permutations([1, 2, 3], count), permutations(["a", "b"], count)):
            every = list(product([INT, LONG], repeat=count))
            # in another order than that of their numbers: at most the first is wider
            for types in every if list(ids) == sorted(ids) else [every[0], (LONG, *every[0][1:])]:
                columns = [column(i, n, t[0], oid=t[1]) for i, n, t in zip(ids, names, types, strict=True)]
                yield target_schema(replace(ORDERS, columns=tuple(columns)), TypePolicy.EXACT)


TABLES = list(tables())
PRESENT = [table for table in TABLES if [column_id(field) for field in table][:-2] in ([], [b"1"], [b"1", b"2"])]
"""Of tables that differ in nothing but the numbers of their columns one."""


def planned(
    present: pa.Schema, wanted: pa.Schema, changes: SchemaChanges, *, replaced: bool = False
) -> EvolutionPlan | None:
    try:
        return plan(present, ColumnChange(wanted, changes, replaced=replaced, topic="public.orders"))
    except SchemaNotApplicable:
        return None


def after(present: pa.Schema, found: EvolutionPlan) -> pa.Schema:
    if found.columns:
        return pa.schema([made.field for made in found.columns])
    return pa.schema([*present, *found.added])


def every_pair(*policies: SchemaChanges) -> Iterator[tuple[pa.Schema, pa.Schema, EvolutionPlan | None]]:
    for present, wanted, changes, replaced in product(PRESENT, TABLES, policies, [False, True]):
        yield present, wanted, planned(present, wanted, changes, replaced=replaced)


def shape(schema: pa.Schema) -> set[tuple[bytes | None, str, pa.DataType]]:
    return {(column_id(field), field.name, field.type) for field in schema}


def test_what_is_planned_gives_every_wanted_column_and_once_done_is_nothing():
    for present, wanted in product(PRESENT, TABLES):
        different = list[EvolutionPlan]()
        for changes, replaced in product(POLICIES, [False, True]):
            found = planned(present, wanted, changes, replaced=replaced)
            if found is not None and found not in different:
                different.append(found)
        for found in different:
            reached = after(present, found)
            assert shape(wanted) <= shape(reached)
            assert len({name.casefold() for name in reached.names}) == len(reached.names)
            assert (
                plan(reached, ColumnChange(wanted, SchemaChanges.EVOLVE, replaced=False, topic="public.orders"))
                == EvolutionPlan()
            )


def test_a_column_keeps_its_values_under_every_name_it_gets():
    for present, _, found in every_pair(SchemaChanges.EVOLVE):
        before = {column_id(field): field for field in present if column_id(field)}
        for made in () if found is None else found.columns:
            same = before.get(column_id(made.field))
            if same is not None and not (same.type == pa.int64() and made.field.type == pa.int32()):
                assert made.source == same.name


def test_evolve_refuses_only_what_not_every_value_survives_and_a_copy_takes_all():
    for present, wanted in product(PRESENT, TABLES):
        before = {column_id(field): field.type for field in present}
        narrower = any(before.get(column_id(f)) == pa.int64() and f.type == pa.int32() for f in wanted)
        assert (planned(present, wanted, SchemaChanges.EVOLVE) is None) == narrower
        assert planned(present, wanted, SchemaChanges.EVOLVE, replaced=True) is not None


def test_lenient_refuses_nothing_and_no_column_of_before_loses_what_it_held():
    for present, _, found in every_pair(SchemaChanges.LENIENT):
        assert found is not None
        kept = {made.source for made in found.columns if made.convert is None}
        assert not found.columns or kept >= set(present.names)


def test_try_evolve_is_evolve_where_that_goes_and_lenient_elsewhere():
    for present, wanted in product(PRESENT, TABLES):
        wished = planned(present, wanted, SchemaChanges.EVOLVE) or planned(present, wanted, SchemaChanges.LENIENT)
        found = planned(present, wanted, SchemaChanges.TRY_EVOLVE)
        assert found is not None
        assert wished is not None
        assert (found.steps, after(present, found)) == (wished.steps, after(present, wished))


def test_exception_refuses_every_change_and_nothing_else():
    for present, wanted in product(PRESENT, TABLES):
        assert (planned(present, wanted, SchemaChanges.EXCEPTION) is None) == (shape(present) != shape(wanted))


def test_ignore_keeps_the_columns_of_the_target_and_finds_in_every_row_what_they_hold():
    for present, wanted in product(PRESENT, TABLES):
        source = replace(ORDERS, columns=tuple(column_of(field) for field in wanted if column_id(field)))
        held = target_schema(
            with_target_types(source, present, SchemaChanges.IGNORE, TypePolicy.EXACT), TypePolicy.EXACT
        )
        assert (
            plan(present, ColumnChange(held, SchemaChanges.IGNORE, replaced=False, topic="public.orders"))
            == EvolutionPlan()
        )
        assert {column_id(f) for f in held} == {column_id(f) for f in present} & {column_id(f) for f in wanted} | {None}


def column_of(field: pa.Field):
    name, oid = INT if field.type == pa.int32() else LONG
    return column(int(column_id(field) or 0), field.name, name, oid=oid)


def test_new_columns_alone_are_metadata():
    present = target_schema(replace(ORDERS, columns=(ID,)), TypePolicy.EXACT)
    found = plan(
        present,
        ColumnChange(
            target_schema(ORDERS, TypePolicy.EXACT), SchemaChanges.EVOLVE, replaced=False, topic="public.orders"
        ),
    )

    assert ([field.name for field in found.added], found.columns) == (["item", "price"], ())


def test_a_column_of_another_hand_is_never_taken_and_lenient_puts_it_aside():
    present = target_schema(replace(ORDERS, columns=(ID,)), TypePolicy.EXACT).append(pa.field("Item", pa.string()))
    wanted = target_schema(ORDERS, TypePolicy.EXACT)

    with pytest.raises(SchemaNotApplicable, match="another client"):
        plan(present, ColumnChange(wanted, SchemaChanges.EVOLVE, replaced=True, topic="public.orders"))
    found = plan(present, ColumnChange(wanted, SchemaChanges.LENIENT, replaced=False, topic="public.orders"))
    assert {(made.field.name, made.source) for made in found.columns} >= {("Item%v1", "Item"), ("item", None)}


def test_a_name_put_aside_twice_gets_another_one():
    present = target_schema(ORDERS, TypePolicy.EXACT)
    for id_ in (8, 9):
        wanted = target_schema(replace(ORDERS, columns=(ID, replace(ITEM, id=id_), PRICE)), TypePolicy.EXACT)
        present = after(
            present, plan(present, ColumnChange(wanted, SchemaChanges.LENIENT, replaced=False, topic="public.orders"))
        )

    assert {"item", "item%v1", "item%v2"} <= set(present.names)


@pytest.mark.parametrize("changes", POLICIES)
def test_a_column_held_as_text_stays_text_while_its_type_is_the_same(changes):
    tags = column(4, "tags", "integer[]", oid=1007)
    schema = replace(ORDERS, columns=(ID, tags))
    present = target_schema(schema, TypePolicy.TEXT)
    held = target_schema(with_target_types(schema, present, changes, TypePolicy.EXACT), TypePolicy.EXACT)

    assert held.field("tags").type == pa.string()
    other = replace(schema, columns=(ID, replace(tags, type_oid=1016, type_name="bigint[]")))
    retyped = (
        target_schema(with_target_types(other, present, changes, TypePolicy.EXACT), TypePolicy.EXACT).field("tags").type
    )
    assert retyped == (pa.string() if changes is SchemaChanges.IGNORE else pa.list_(pa.field("element", pa.int64())))


def test_under_ignore_a_new_part_of_the_key_cannot_be_left_out():
    present = target_schema(replace(ORDERS, columns=(ID, PRICE)), TypePolicy.EXACT)
    rekeyed = replace(ORDERS, columns=(ID, replace(ITEM, key=1), PRICE))

    with pytest.raises(SchemaNotApplicable, match="'item' is now part of the key"):
        with_target_types(rekeyed, present, SchemaChanges.IGNORE, TypePolicy.EXACT)


def test_columns_that_are_no_source_columns_are_found_by_name():
    ours = target_schema(replace(ORDERS, columns=(ID,)), TypePolicy.EXACT)

    assert sources(ours, ours) == {"id": "id", "_position": "_position", "_ordinal": "_ordinal"}
