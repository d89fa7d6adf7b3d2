"""Failing rows: the rows that a conversion refuses."""

from __future__ import annotations

import pyarrow as pa

from cdc.errors import ValueNotRepresentable
from pipelines.types.failing_rows import failing_rows


def refuse_negative(rows: pa.Table) -> None:
    """Refuse a table with a negative number, naming it."""
    negative = [number for number in rows["number"].to_pylist() if number < 0]
    if negative:
        raise ValueNotRepresentable(f"number {negative[0]}")


def test_every_row_that_alone_is_refused_is_returned_with_its_own_error() -> None:
    rows = pa.table({"number": [1, -2, 3, 4, -5, -6, 7]})
    failing = failing_rows(rows, refuse_negative, rows.num_rows)

    assert {row: error.message for row, error in failing.items()} == {1: "number -2", 4: "number -5", 5: "number -6"}
    assert len(failing_rows(rows, refuse_negative, 1)) == 2
    assert failing_rows(rows.slice(2, 2), refuse_negative, 2) == {}
