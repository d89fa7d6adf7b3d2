"""Compare: the unit is two sides of text rows; a plain multiset difference is the specification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pipelines.verification import compare_rows as limits
from pipelines.verification.canonical_text import text_batch
from pipelines.verification.compare_rows import ComparedColumns, Comparison, Rows, compare

SHAPE = ComparedColumns(("id", "name"), (0,))
KEYLESS = ComparedColumns(("id", "name"), ())

Table = list[tuple[str | None, str | None]]


def side(rows: Table, size: int = 3) -> Rows:
    def read() -> Iterator[pa.RecordBatch]:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield text_batch([pa.array([row[place] for row in part], pa.string()) for place in (0, 1)])

    return read


def compared(source: Table, target: Table, shape: ComparedColumns = SHAPE) -> Comparison:
    return compare(side(source), side(target, 2), shape)


ROWS: Table = [(str(number), f"name {number}") for number in range(50)]


def test_the_same_rows_in_another_order_are_equal() -> None:
    found = compared(ROWS, ROWS[::-1])
    assert found.equal
    assert (found.source_rows, found.target_rows) == (50, 50)


def test_one_flipped_value_is_named_with_its_column() -> None:
    found = compared(ROWS, [*ROWS[:7], ("7", "other"), *ROWS[8:]])
    assert not found.equal
    assert found.mismatches.differing == [{"key": ["7"], "columns": ["name"]}]
    assert found.mismatches.counts == {"missing": 0, "extra": 0, "differing": 1}


def test_a_dropped_row_is_missing_and_an_invented_one_extra() -> None:
    found = compared(ROWS, [*ROWS[1:], ("99", "new")])
    assert found.mismatches.missing == [["0"]]
    assert found.mismatches.extra == [["99"]]


def test_a_duplicated_row_is_extra() -> None:
    assert compared(ROWS, [*ROWS, ROWS[3]]).mismatches.extra == [["3"]]


def test_null_is_not_the_empty_string() -> None:
    found = compared([("1", None)], [("1", "")])
    assert found.mismatches.differing == [{"key": ["1"], "columns": ["name"]}]


def test_text_does_not_flow_from_one_column_into_the_next() -> None:
    assert not compared([("ab", "c")], [("a", "bc")]).equal
    assert not compared([("", "x")], [("x", "")]).equal


def test_keys_are_named_up_to_a_limit_and_counted_beyond() -> None:
    found = compared(ROWS, [])
    assert len(found.mismatches.missing) == limits.LISTED
    assert found.mismatches.counts["missing"] == len(ROWS)


def test_a_keyless_table_is_a_multiset() -> None:
    rows: Table = [("1", "a"), ("1", "a"), ("1", None)]
    assert compared(rows, rows[::-1], KEYLESS).equal
    found = compared(rows, rows[1:], KEYLESS)
    assert found.mismatches.missing == [["1", "a"]]


texts = st.none() | st.text(max_size=12)
tables = st.lists(st.tuples(texts, texts), max_size=30)


@given(tables, tables)
def test_counts_are_those_of_the_multiset_difference(source: Table, target: Table) -> None:
    found = compared(source, target, KEYLESS)
    missing, extra = Counter(source) - Counter(target), Counter(target) - Counter(source)
    assert found.mismatches.counts == {"missing": missing.total(), "extra": extra.total(), "differing": 0}
    assert found.equal == (Counter(source) == Counter(target))
