"""Differences between the rows of a view at two cuts, and their rows in the log."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import ViewKeyNotUnique
from cdc.log_row import LOG_SCHEMA, RowOrder
from pipelines.views.changed_rows import ROWS, all_new, check_key, differences, log_rows
from tests.log.rows import schema_of

SCHEMA = schema_of(7, "note")
Rows = dict[str, str | None]


def rows(found: Rows, *, swapped: bool = False) -> pa.Table:
    """Rows of a view with a key and a note; swapped: the columns of an image are in the other order."""
    images = [[(1, key), (2, note)] for key, note in found.items()]
    return pa.table(
        {"key": [[key] for key in found], "after": [image[::-1] if swapped else image for image in images]}, schema=ROWS
    )


def applied(old: Rows, changes: pa.Table) -> Rows:
    found = dict(old)
    for change in changes.to_pylist():
        (key,) = change["key"]
        if change["op"] == "d":
            assert dict(change["before"])[2] == found.pop(key)
        else:
            assert (change["op"] == "c") == (key not in found)
            found[key] = dict(change["after"])[2]
    return found


some_rows = st.dictionaries(st.text("abc", max_size=2), st.none() | st.text("xy", max_size=1), max_size=6)


@given(some_rows, some_rows, st.booleans())
def test_the_differences_turn_the_old_rows_into_the_new_ones_and_change_no_equal_row(
    old: Rows, new: Rows, swapped: bool
) -> None:
    changes = differences(rows(old), rows(new, swapped=swapped))

    assert applied(old, changes) == new
    assert changes.num_rows == sum(old.get(key, 0) != new.get(key, 0) for key in {*old, *new})


def test_a_row_in_the_log_has_its_place_and_all_columns() -> None:
    changes = pa.concat_tables([all_new(rows({"a": "x"})), differences(rows({"b": "y"}), rows({}))])
    found: list[dict[str, Any]] = log_rows(changes, SCHEMA, RowOrder(90, 4, 0, 1_000_000)).to_pylist()

    assert [(r["position"], r["ordinal"], r["op"], r["key"], r["topic"]) for r in found] == [
        (90, 4, "r", ["a"], "shop.orders"),
        (90, 5, "d", ["b"], "shop.orders"),
    ]
    assert (found[0]["after"], found[1]["before"]) == ([(1, "a"), (2, "x")], [(1, "b"), (2, "y")])
    assert log_rows(changes, SCHEMA, RowOrder(90, 4, 0, 1)).schema == LOG_SCHEMA


def test_a_key_identifies_one_row() -> None:
    check_key(rows({"a": "x", "b": None}), SCHEMA)
    with pytest.raises(ViewKeyNotUnique, match=r"more than one row with the key \(id\) = \['a'\]"):
        check_key(pa.concat_tables([rows({"a": "x"}), rows({"a": "y"})]), SCHEMA)
