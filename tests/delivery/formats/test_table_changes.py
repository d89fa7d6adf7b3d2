"""Log rows as columns: what a format gets to encode."""

from __future__ import annotations

from cdc.delivery.formats.table_changes import table_changes
from tests.delivery.formats.changes import ID, changes_of, column, log_row, log_rows, schema_with

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


def test_a_key_of_another_width_counts_as_missing() -> None:
    changes = changes_of(SCHEMA, log_row("c", 0, key=["1"]), log_row("c", 1, key=["1", "2"]), log_row("t", 2))
    assert [part.to_pylist() for part in changes.key] == [["1", None, None]]


def test_a_slice_of_rows_has_its_own_columns() -> None:
    rows = log_rows([log_row("c", number, key=[str(number)], after={1: str(number), 2: "x"}) for number in range(5)])
    changes = table_changes(SCHEMA, "t", rows.slice(2, 2))
    assert changes.after.columns[1].texts.to_pylist() == ["2", "3"]
    assert [part.to_pylist() for part in changes.key] == [["2", "3"]]
