"""Merging the images of each key; that the fold is right for any history is shown in `test_fold.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.folding.image_overlay import PART_BYTES, latest_images
from tests.pipelines.fold_model import log_row, to_arrow


def change(place: int, op: str, after: dict[int, str | None] | None, *, partial: bool = False) -> dict[str, Any]:
    return log_row(1, (1, place), op, key=["k"], after=after, partial=partial)


def merged(*rows: dict[str, Any], part_bytes: int = PART_BYTES) -> list[dict[str, Any]]:
    """The result for rows of three keys by turns, in the order of the numbers of their latest rows."""
    table, keys = to_arrow(list(rows)), np.arange(len(rows)) % 3
    found = latest_images(table, keys, part_bytes)
    return sorted(found.to_pylist(maps_as_pydicts="strict"), key=lambda row: row["row"])


ROWS = [
    change(0, "c", {1: "a", 2: "b", 3: None}),
    change(1, "u", {1: "x", 3: "y"}, partial=True),
    change(2, "c", {1: "gone"}),
    change(3, "u", {1: "c", 3: "d"}, partial=True),
    change(4, "u", {2: None}, partial=True),
    change(5, "d", None),
    change(6, "u", {3: None}, partial=True),
]


@pytest.mark.parametrize("part_bytes", [PART_BYTES, 8, 1])
def test_later_images_replace_the_columns_that_they_have(part_bytes: int) -> None:
    assert merged(*ROWS, part_bytes=part_bytes) == [
        {"row": 4, "after": {1: "x", 2: None, 3: "y"}, "complete": False},
        {"row": 5, "after": None, "complete": True},
        {"row": 6, "after": {1: "c", 2: "b", 3: None}, "complete": True},
    ]


def test_the_order_of_the_log_counts_and_not_that_of_the_rows() -> None:
    table, keys = to_arrow(ROWS[::-1]), np.array([n % 3 for n in range(7)][::-1])

    found = latest_images(table, keys)

    assert sorted(found["row"].to_pylist()) == [0, 1, 2]


def test_an_image_that_is_alone_or_complete_stays_as_it_is() -> None:
    rows = [change(n, "u", {1: str(n)}, partial=n == 1) for n in range(6)]

    assert [row["after"] for row in merged(*rows)] == [{1: "3"}, {1: "4"}, {1: "5"}]
    assert [row["complete"] for row in merged(*rows[:2])] == [True, False]


def test_without_rows_there_is_no_image() -> None:
    assert latest_images(to_arrow([]), np.empty(0, np.int64)).schema == pa.schema(
        {"row": pa.int64(), "after": pa.map_(pa.int32(), pa.string()), "complete": pa.bool_()}
    )
