"""Nulled counts: a total of each table, and what came since the last report."""

from __future__ import annotations

from pipelines.runtime.nulled_counts import NulledCounts


def test_each_table_has_a_total_and_what_came_since_the_last_report() -> None:
    counts = NulledCounts()
    counts.add("shop.a", 2)
    counts.add("shop.b", 1)
    assert counts.pop_counts() == {"shop.a": 2, "shop.b": 1}
    counts.add("shop.a", 3)

    assert counts.pop_counts() == {"shop.a": 3}
    assert [counts.total(topic) for topic in ("shop.a", "shop.b", "shop.c")] == [5, 1, 0]
