"""PositionHistory: how long there has been something that another position does not have."""

from __future__ import annotations

import pytest

from cdc.service.position_history import PositionHistory


def history(*seen: tuple[float, int]) -> PositionHistory:
    found = PositionHistory()
    for at, position in seen:
        found.add(at, position)
    return found


def test_a_position_that_has_everything_is_not_behind() -> None:
    assert history((1.0, 10), (2.0, 20)).seconds_behind(20, 100.0) == 0.0
    assert history().seconds_behind(0, 100.0) == 0.0


def test_a_position_is_behind_since_the_first_that_it_does_not_have_was_seen() -> None:
    seen = history((1.0, 10), (2.0, 20), (3.0, 30))
    assert [seen.seconds_behind(position, 10.0) for position in (5, 10, 15, 29)] == [9.0, 8.0, 8.0, 7.0]


def test_a_position_seen_again_is_as_old_as_when_it_was_seen_first() -> None:
    assert history((1.0, 10), (5.0, 10)).seconds_behind(9, 6.0) == 5.0


def test_what_everybody_has_can_be_forgotten() -> None:
    seen = history((1.0, 10), (2.0, 20), (3.0, 30))
    seen.forget(20)
    assert (seen.seconds_behind(20, 10.0), seen.seconds_behind(0, 10.0)) == (7.0, 7.0)


def test_a_position_that_went_back_begins_a_new_history() -> None:
    assert history((1.0, 10), (2.0, 20), (3.0, 15)).seconds_behind(0, 4.0) == 1.0


@pytest.mark.parametrize("behind", [1, 50_000, 99_000, 99_990])
def test_ages_stay_right_however_many_positions_were_seen(behind: int) -> None:
    seen = history(*((float(at), at) for at in range(100_000)))
    age = 100_000 - (behind + 1)
    assert seen.seconds_behind(behind, 100_000.0) == pytest.approx(age, rel=0.2, abs=1)
