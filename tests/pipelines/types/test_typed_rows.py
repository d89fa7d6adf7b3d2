"""Typed rows: row images as tables with the schema of a target."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import SchemaNotApplicable, ValueNotRepresentable
from pipelines.types.families import TypePolicy
from pipelines.types.typed_rows import AT_ONCE, sent_cells, target_schema, typed_keys, typed_rows
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, Row, column, folded, part, put

IMAGES = st.lists(
    st.dictionaries(st.sampled_from([1, 2, 3, 9]), st.none() | st.integers(0, 99).map(str), max_size=4), max_size=12
)


def test_the_table_has_exactly_the_targets_schema():
    rows = typed_rows(folded([put(1, "a", 10), put(2, None, 11, ordinal=3)]), ORDERS, TypePolicy.EXACT)

    assert rows.schema.equals(target_schema(ORDERS, TypePolicy.EXACT), check_metadata=True)
    assert rows.to_pylist() == [
        {"id": 1, "item": "a", "price": Decimal("1.00"), "_position": 10, "_ordinal": 0},
        {"id": 2, "item": None, "price": Decimal("1.00"), "_position": 11, "_ordinal": 3},
    ]


@given(IMAGES)
def test_every_cell_is_what_the_image_says_whatever_columns_it_has(images):
    rows = folded([Row(("1",), 10, image) for image in images])
    typed = typed_rows(rows, ORDERS, TypePolicy.TEXT)
    sent = sent_cells(rows, ORDERS)

    for place, source in enumerate((ID, ITEM, PRICE)):
        assert typed[source.name].to_pylist() == [image.get(source.id) for image in images]
        assert sent[place].tolist() == [source.id in image for image in images]


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_slice_of_images_gives_the_slice_of_the_table(start, length):
    rows = folded([put(n, f"item {n}", n) if n % 2 else part(n, n, {3: "1.00"}) for n in range(1, 7)])
    whole = typed_rows(rows, ORDERS, TypePolicy.EXACT)

    assert typed_rows(rows.slice(start, length), ORDERS, TypePolicy.EXACT).equals(whole.slice(start, length))


def test_a_column_that_an_image_lacks_takes_its_default():
    wider = replace(ORDERS, columns=(ID, ITEM, PRICE, column(4, "note", missing="none")))

    assert typed_rows(folded([put(1, "a", 10)]), wider, TypePolicy.EXACT)["note"].to_pylist() == ["none"]


@pytest.mark.parametrize("bad", range(5))
def test_the_first_value_that_does_not_fit_is_named_by_column_type_and_position(bad):
    rows = [put(n, "a", 16 + n, price="NaN" if n >= bad else "1.00") for n in range(6)]
    with pytest.raises(ValueNotRepresentable, match=rf"'price'.*'numeric'.*0/{16 + bad:X} ") as caught:
        typed_rows(folded(rows), ORDERS, TypePolicy.EXACT)

    assert "NaN" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_more_rows_than_are_converted_at_once_keep_their_order_and_the_first_bad_value():
    rows = pa.concat_tables([folded([put(n, "a", 16 + n, price="1.00") for n in range(2)])] * (AT_ONCE // 2 + 1))
    assert rows.num_rows > AT_ONCE
    typed = typed_rows(rows, ORDERS, TypePolicy.EXACT)
    assert typed["id"].to_pylist() == [0, 1] * (AT_ONCE // 2 + 1)
    assert typed.schema == target_schema(ORDERS, TypePolicy.EXACT)

    bad = folded([put(7, "a", 16 + 7, price="NaN")])
    with pytest.raises(ValueNotRepresentable, match=r"'price'.*0/17 "):
        typed_rows(pa.concat_tables([rows, bad]), ORDERS, TypePolicy.EXACT)


def test_keys_come_in_key_order():
    schema = replace(ORDERS, columns=(replace(ID, key=1), replace(ITEM, key=0)))
    keys = pa.array([["a", "1"], ["b", "2"]])

    assert typed_keys(keys, schema, TypePolicy.EXACT).to_pydict() == {"item": ["a", "b"], "id": [1, 2]}


def test_a_key_of_another_width_is_refused():
    with pytest.raises(SchemaNotApplicable, match="1 key columns"):
        typed_keys(pa.array([["1", "2"]]), ORDERS, TypePolicy.EXACT)


def test_generated_columns_have_no_target_column():
    schema = replace(ORDERS, columns=(ID, column(5, "total", generated=True)))

    assert target_schema(schema, TypePolicy.EXACT).names == ["id", "_position", "_ordinal"]


def test_names_that_differ_in_case_only_are_refused():
    with pytest.raises(SchemaNotApplicable, match="'id' and 'ID'"):
        target_schema(replace(ORDERS, columns=(ID, column(5, "ID"))), TypePolicy.EXACT)


def test_a_source_column_named_as_ours_has_another_name_in_the_target():
    schema = replace(ORDERS, columns=(ID, column(5, "_position")))

    assert target_schema(schema, TypePolicy.EXACT).names == ["id", "%5Fposition", "_position", "_ordinal"]


def test_no_rows_give_an_empty_table_of_the_schema():
    typed = typed_rows(folded([]), ORDERS, TypePolicy.EXACT)

    assert (typed.num_rows, typed.schema) == (0, target_schema(ORDERS, TypePolicy.EXACT))
    assert sent_cells(folded([]), ORDERS).shape == (3, 0)
    assert np.count_nonzero(sent_cells(folded([]), ORDERS)) == 0
