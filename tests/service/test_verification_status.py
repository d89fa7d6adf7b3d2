"""Verification status: results as text, and tables that differ as problems."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from cdc.service.verification_status import mismatch_problems, verified_statuses
from tests.catalog.test_verified_ranges import range_of
from tests.service.pipeline import new_catalog

AT = datetime(2026, 11, 20, 12, tzinfo=UTC)


def test_a_table_that_differs_is_a_problem_and_an_equal_one_is_not(tmp_path: Path) -> None:
    with new_catalog(tmp_path) as catalog:
        catalog.verified.record("shop", range_of(topic="shop.items", verified_at=AT))
        catalog.verified.record("shop", range_of(topic="shop.orders", verified_at=AT, mismatched=3))
        items, orders = verified_statuses(catalog.verified.ls("shop"))

    assert (items.verified_through, items.equal_at, items.mismatched) == (AT.isoformat(), AT.isoformat(), 0)
    assert (orders.verified_through, orders.equal_at, orders.mismatched) == (AT.isoformat(), None, 3)
    (problem,) = mismatch_problems([items, orders])
    assert (problem.subject, problem.code) == ("table shop.orders in lake", "CDC-6001")
    assert problem.message.startswith("3 rows differed")
