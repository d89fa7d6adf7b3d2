"""SourceObservation: the forecast of a slot, and when it is at risk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.service.slot_risk import SourceObservation


def test_what_is_kept_and_what_is_left_is_one_sentence() -> None:
    found = SourceObservation(
        slot="s", up=True, retained_bytes=51_000_000, safe_bytes=23_000_000, wal_bytes_per_second=95_000
    )
    assert found.forecast == (
        "the server retains 51.0 MB of WAL for slot 's'; the slot is lost after 23.0 MB more, "
        "in about 4.0 min at the present rate"
    )


@pytest.mark.parametrize(
    ("kept", "left", "rate", "active", "at_risk"),
    [
        (51_000_000, 23_000_000, 0.0, True, True),  # more is used than left
        (10_000_000, 90_000_000, 1_000_000.0, True, False),  # a reader that keeps up needs no time
        (10_000_000, 90_000_000, 1_000_000.0, False, True),  # nobody reads, and it lasts 90 s
        (10_000_000, 90_000_000, 10.0, False, False),  # nobody reads, and it lasts for months
        (10_000_000, None, 1_000_000.0, False, False),  # there is no limit
    ],
)
def test_a_slot_is_at_risk_by_what_is_left_and_by_the_time_it_lasts(
    kept: int, left: int | None, rate: float, active: bool, at_risk: bool
) -> None:
    found = SourceObservation(
        slot="s", up=True, slot_active=active, retained_bytes=kept, safe_bytes=left, wal_bytes_per_second=rate
    )
    assert found.is_at_risk is at_risk
    assert bool(found.problems()) is at_risk


def test_a_command_that_has_just_begun_to_look_knows_a_hung_reader_by_its_last_status_update() -> None:
    observed = SourceObservation(
        slot="s", up=True, slot_active=True, retained_bytes=1_000, safe_bytes=9_000_000, wal_bytes_per_second=1e5
    )
    assert not replace(observed, feedback_age_seconds=9.0).is_at_risk
    assert replace(observed, feedback_age_seconds=90.0).is_at_risk


@pytest.mark.parametrize("status", ["unreserved", "lost"])
def test_a_slot_whose_wal_goes_or_is_gone_is_a_problem(status: str) -> None:
    (problem,) = SourceObservation(slot="s", up=True, retained_bytes=1, wal_status=status).problems()
    assert "lost" in problem.message
    assert (problem.code == "CDC-2103") == (status == "lost")
