"""Verification status: results as text, and tables that differ as problems."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cdc.catalog.verification_state import VerificationRecord, VerificationState
from cdc.service.verification_status import (
    mismatch_problems,
    verification_problems,
    verification_status,
    verified_statuses,
)
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


def test_a_failing_verification_is_a_problem_and_without_a_server_process_nothing_is_verified(tmp_path: Path) -> None:
    error = {"code": "CDC-2001", "message": "no answer", "suggestion": "start the server"}
    record = VerificationRecord(state=VerificationState.FAILING, every=3600.0, error=error, next_at=AT.isoformat())
    failing = verification_status(record, (), has_server=True)
    (problem,) = verification_problems(failing)
    assert (problem.subject, problem.code, problem.remedy) == ("verification", "CDC-2001", "start the server")
    for absent in (
        verification_status(record, (), has_server=False),
        verification_status(None, (), has_server=True),
    ):
        assert (absent.state, list(verification_problems(absent))) == ("absent", [])
        assert absent.detail == "the server process, which verifies, does not run"


def test_a_waiting_verification_shows_its_next_pass_and_through_when_all_is_verified(tmp_path: Path) -> None:
    with new_catalog(tmp_path) as catalog:
        for days, topic in enumerate(("shop.items", "shop.orders")):
            at = AT - timedelta(days=days)
            catalog.verified.record("shop", range_of(topic=topic, began=at, verified_at=at))
        verified = verified_statuses(catalog.verified.ls("shop"))
    record = VerificationRecord(state=VerificationState.WAITING, every=3600.0, next_at=AT.isoformat())
    waiting = verification_status(record, verified, has_server=True)
    assert waiting.detail == "next pass at 2026-11-20 12:00 UTC"
    assert (waiting.tables, waiting.verified_through) == (2, (AT - timedelta(days=1)).isoformat())
