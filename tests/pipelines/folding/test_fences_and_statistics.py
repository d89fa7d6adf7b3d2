"""Statistics of a range, collected from narrow columns."""

from __future__ import annotations

import pyarrow as pa

from pipelines.folding.fences_and_statistics import (
    STATISTICS_COLUMNS,
    Fence,
    RangeStatistics,
    add_fences,
    collect_statistics,
    fence_rows,
    is_fenced,
)
from tests.pipelines.fold_model import SINK, log_row, to_arrow
from tests.pipelines.folding.test_fold import change, partial


def test_statistics_are_those_of_the_rows_for_a_sink() -> None:
    moved = partial(3, "b", {1: "b"}, old="a") | {"address": "theirs"}
    marks = [log_row(1, (4, 2), "t"), log_row(1, (9, 0), "g", payload=b"6"), log_row(1, (5, 0), "t")]
    tables = [to_arrow(rows).select(list(STATISTICS_COLUMNS)) for rows in ([partial(0, "a", {})], [moved, *marks])]

    assert collect_statistics(tables, sink=SINK) == RangeStatistics(
        partial=True, moves=False, fences={1: Fence(5, 0, 6)}, links=0
    )
    assert collect_statistics(tables, sink="theirs").moves


def test_an_empty_range_has_empty_statistics() -> None:
    assert (
        collect_statistics([], sink=SINK)
        == collect_statistics([pa.table(to_arrow([]))], sink=SINK)
        == RangeStatistics(links=0)
    )


def test_links_are_the_longest_chain_of_partial_key_changes() -> None:
    rows = [partial(1, "b", {}, old="a"), partial(2, "c", {}, old="b"), partial(3, "y", {}, old="x")]

    assert collect_statistics([to_arrow(rows)], sink=SINK).links == 2


def test_rows_before_the_last_truncate_or_generation_are_fenced() -> None:
    rows = to_arrow(
        [
            change(0, "c", "a"),
            log_row(1, (1, 1), "t"),
            change(2, "c", "b"),
            log_row(2, (3, 0), "c", key=["a"]),
            log_row(2, (9, 0), "g", payload=b"4"),
        ]
    )
    fences: dict[int, Fence] = {}
    add_fences(fences, fence_rows(rows))

    assert is_fenced(rows, fences).to_pylist() == [True, False, False, True, False]
