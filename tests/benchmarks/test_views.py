"""Views: which rows a step of the benchmark changes."""

from __future__ import annotations

from tests.benchmarks.views import CHANGES, changed_ids

ROWS = {"customers": 33_000, "orders": 330_000, "items": 1_000_000}


def test_a_step_changes_a_thousand_rows_that_lie_anywhere_in_their_tables() -> None:
    ids = changed_ids(1, ROWS)

    assert sum(map(len, ids.values())) == CHANGES
    for table, changed in ids.items():
        tenths = {number * 10 // ROWS[table] for number in changed}
        assert tenths == set(range(10)), f"{table}: only tenths {tenths}"
        assert len(set(changed)) == len(changed)


def test_steps_change_different_rows_and_a_repeated_run_the_same_ones() -> None:
    assert changed_ids(1, ROWS) == changed_ids(1, ROWS)
    assert changed_ids(1, ROWS)["items"] != changed_ids(2, ROWS)["items"]
