"""Log rows as columns: what a format gets to encode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc.delivery.formats.table_changes import table_changes
from tests.delivery.formats.changes import ID, changes_of, column, log_row, log_rows, schema_with
from tests.fixtures.examples import examples

SCHEMA = schema_with(ID, column("a"), column("b"))


def test_images_are_divided_into_columns() -> None:
    changes = changes_of(
        SCHEMA,
        log_row("c", 0, key=["1"], after={1: "1", 2: None, 3: "x"}),
        log_row("u", 1, key=["2"], before={1: "0"}, after={3: "y", 1: "2"}),
        log_row("d", 2, key=["3"]),
    )
    assert changes.after.exists.tolist() == [True, True, False]
    assert changes.before.exists.tolist() == [False, True, False]
    assert changes.after.columns[1].texts.to_pylist() == ["1", "2", None]
    assert changes.after.columns[1].unsent is None
    assert changes.after.columns[2].texts.to_pylist() == [None, None, None]
    unsent = changes.after.columns[2].unsent
    assert unsent is not None
    assert list(unsent) == [False, True, False]
    assert changes.after.columns[3].texts.to_pylist() == ["x", "y", None]
    assert changes.before.columns[1].texts.to_pylist() == [None, "0", None]


def test_images_with_all_columns_in_order_are_divided_as_well() -> None:
    changes = changes_of(
        SCHEMA,
        log_row("c", 0, key=["1"], after={1: "1", 2: None, 3: "x"}),
        log_row("d", 1, key=["1"], before={1: "1", 2: "y", 3: None}),
        log_row("c", 2, key=["2"], after={1: "2", 2: "z", 3: "w"}),
    )

    assert [one.texts.to_pylist() for one in changes.after.columns.values()] == [
        ["1", None, "2"],
        [None, None, "z"],
        ["x", None, "w"],
    ]
    assert [one.texts.to_pylist()[1] for one in changes.before.columns.values()] == ["1", "y", None]
    assert all(one.unsent is None for one in changes.after.columns.values())


def test_a_table_without_columns_has_images_without_columns() -> None:
    changes = changes_of(schema_with(), log_row("c", 0, after={}))

    assert changes.after.exists.tolist() == [True]
    assert changes.after.columns == {}


def test_a_key_of_another_width_counts_as_missing() -> None:
    changes = changes_of(SCHEMA, log_row("c", 0, key=["1"]), log_row("c", 1, key=["1", "2"]), log_row("t", 2))
    assert [part.to_pylist() for part in changes.key] == [["1", None, None]]


def test_a_slice_of_rows_has_its_own_columns() -> None:
    rows = log_rows([log_row("c", number, key=[str(number)], after={1: str(number), 2: "x"}) for number in range(5)])
    changes = table_changes(SCHEMA, "t", rows.slice(2, 2))
    assert changes.after.columns[1].texts.to_pylist() == ["2", "3"]
    assert [part.to_pylist() for part in changes.key] == [["2", "3"]]


_TEXTS = st.one_of(st.none(), st.sampled_from(["", "x", "é", "0"]))
_IMAGES = st.one_of(st.none(), st.dictionaries(st.integers(1, 6), _TEXTS, max_size=6))
_KEYS = st.one_of(st.none(), st.lists(st.sampled_from(["1", "2"]), max_size=3))
_ROWS = st.lists(st.tuples(_IMAGES, _IMAGES, _KEYS, _KEYS), max_size=12)


def hidden(column: pa.Array, visible: np.ndarray) -> pa.Array:
    """The array with nulls where it is not visible; the hidden entries stay in the buffers."""
    bits = pa.py_buffer(np.packbits(visible & column.is_valid().to_numpy(False), bitorder="little").tobytes())
    children = [column.values] if pa.types.is_list(column.type) else [pa.StructArray.from_arrays(
        [column.keys, column.items], fields=[column.type.key_field, column.type.item_field]
    )]  # fmt: skip
    return pa.Array.from_buffers(column.type, len(column), [bits, column.buffers()[1]], children=children)


@examples(40)
@given(rows=_ROWS, start=st.integers(0, 5), hide=st.integers(0, 2**12 - 1))
def test_columns_are_those_of_a_row_by_row_reading(rows: list[Any], start: int, hide: int) -> None:
    schema = schema_with(ID, column("b", key=1), column("c"), column("d", generated=True), column("e"))
    table = log_rows(
        [
            log_row("u", n, before=before, after=after, key=key, old_key=old)
            for n, (before, after, key, old) in enumerate(rows)
        ]
    )
    visible = np.array([not hide >> n & 1 for n in range(len(rows))], dtype=bool)
    for name in ("before", "after", "key", "old_key"):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), hidden(table[name].combine_chunks(), visible))
    table = table.slice(start)

    found = table_changes(schema, "t", table)

    kept = [row if seen else (None,) * 4 for row, seen in zip(rows, visible, strict=True)][start:]
    assert found.count == len(kept)
    for image, images in ((found.before, [one[0] for one in kept]), (found.after, [one[1] for one in kept])):
        assert list(image.exists) == [one is not None for one in images]
        assert set(image.columns) == {1, 2, 3, 5}
        for number, values in image.columns.items():
            assert values.texts.to_pylist() == [None if one is None else one.get(number) for one in images]
            unsent = [False] * len(kept) if values.unsent is None else list(values.unsent)
            assert unsent == [one is not None and number not in one for one in images]
    for parts, keys in ((found.key, [one[2] for one in kept]), (found.old_key, [one[3] for one in kept])):
        whole = [one if one is not None and len(one) == 2 else [None, None] for one in keys]
        assert [list(one) for one in zip(*(part.to_pylist() for part in parts), strict=True)] == whole
