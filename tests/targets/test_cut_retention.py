"""Which cuts stay as they age, and which one a moment means: cdc/targets/cut_retention.py."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import CutUnavailable
from cdc.position import Position
from cdc.targets.cut_retention import ListedCut, find_cut, kept_cuts

SECOND = 1_000_000
DAY = 86_400
START = 1_790_000_000 * SECOND
"""Some instant of 2026, in µs."""
gaps = st.lists(st.one_of(st.integers(1, SECOND), st.integers(1, 3 * 3600 * SECOND)), max_size=60)


def instants(steps: list[int]) -> list[int]:
    found = [START]
    for step in steps:
        found.append(found[-1] + step)
    return found


@given(gaps, st.sampled_from([0, 30, 3_000, DAY]))
def test_every_cut_of_the_last_minute_stays_and_none_that_is_older_than_what_is_retained(steps, retain):
    published = instants(steps)
    stay = kept_cuts(published, published[-1], retain)

    assert stay[-1] == published[-1]
    young = [instant for instant in published if published[-1] - instant < min(60, retain) * SECOND]
    assert set(young) <= set(stay) <= set(published)
    assert all(published[-1] - instant <= retain * SECOND for instant in stay)
    assert kept_cuts(published, published[-1] + 2 * DAY * SECOND, retain) == published[-1:]


@given(gaps, gaps)
def test_what_stays_later_is_the_same_whether_or_not_it_was_asked_before(earlier, later):
    published = instants([*earlier, *later])
    between = published[len(earlier)]
    asked = [*kept_cuts(published[: len(earlier) + 1], between, DAY), *published[len(earlier) + 1 :]]

    assert kept_cuts(asked, published[-1], DAY) == kept_cuts(published, published[-1], DAY)


def test_a_day_of_publishes_leaves_some_hundred_cuts_no_gap_longer_than_a_minute_or_an_hour():
    published: list[int] = []
    hours = range(0, (DAY - 7_200) * 10, 100)  # those of before the last two hours are thinned to one an hour anyway
    for tenth in (*hours, *range(hours.stop, DAY * 10, 3)):
        published.append(START + tenth * SECOND // 10)
        if tenth % 10_000 == 0:
            published = kept_cuts(published, published[-1], DAY)
    published = kept_cuts(published, published[-1], DAY)

    assert len(published) < 700
    for before, after in pairwise(published):
        assert after - before <= (61 if published[-1] - after < 3_500 * SECOND else 3_661) * SECOND
    assert published[-1] - published[0] > (DAY - 3_600) * SECOND


def test_while_a_clock_that_was_set_back_catches_up_the_cuts_do_not_grow_in_number():
    assert len(kept_cuts(range(START, START + 50_000), START + 50_000, DAY)) <= 1_001


CUTS = [ListedCut(100, START, 1), ListedCut(200, START + 5 * SECOND, 2), ListedCut(200, START + 5 * SECOND, 3)]
NOW = datetime.fromtimestamp(START / SECOND + 60, UTC)


def instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(START / SECOND, UTC) + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("moment", "found"),
    [
        (Position(100), CUTS[0]),
        (Position(199), CUTS[0]),
        (Position(200), CUTS[2]),
        (instant(0), CUTS[0]),
        (instant(4.9), CUTS[0]),
        (instant(5), CUTS[2]),
        (instant(59), CUTS[2]),
    ],
)
def test_a_moment_means_the_last_cut_with_nothing_that_came_after_it(moment, found):
    assert find_cut(CUTS, moment, NOW) is found


def test_a_cut_whose_transactions_include_a_later_one_is_not_meant_although_its_last_is_earlier():
    crossed = [ListedCut(100, START, 1), ListedCut(200, START + 9 * SECOND, 2), ListedCut(300, START + SECOND, 3)]

    assert find_cut(crossed, instant(2), NOW) is crossed[0]


@pytest.mark.parametrize(
    ("cuts", "moment", "words"),
    [
        (CUTS, Position(99), "oldest cut is 0/64"),
        (CUTS, instant(-1), "oldest cut is 0/64"),
        (CUTS, Position(201), "newest cut is 0/C8"),
        (CUTS, instant(61), "newest cut is 0/C8"),
        ([], Position(1), "no cut yet"),
    ],
)
def test_a_moment_without_a_cut_is_an_error_that_names_the_nearest(cuts, moment, words):
    with pytest.raises(CutUnavailable) as caught:
        find_cut(cuts, moment, NOW)

    assert words in caught.value.message
