"""Computed views: at which positions of the log of views a view was exact."""

from __future__ import annotations

from dataclasses import replace

from cdc.log.computed_views import Committed, ComputedFrom, ComputedView

VIEW = ComputedView("f", 800)
FIRST = Committed(position=800, cut=800, last_cut=0)
SECOND = Committed(position=1_600, cut=1_600, last_cut=800)
THIRD = Committed(position=2_400, cut=2_400, last_cut=1_600)


def test_a_view_that_is_computed_at_each_cut_is_exact_from_its_first_commit_on() -> None:
    first = VIEW.committed(FIRST, None)
    second = replace(VIEW, position=1_600).committed(SECOND, first)

    assert [second.was_at(position) for position in (799, 800, 1_600, 1_601, 2_400)] == [False, True, True, True, False]


def test_a_view_that_is_behind_is_exact_up_to_its_own_cut() -> None:
    first = VIEW.committed(FIRST, None)
    behind = first.committed(SECOND, first)

    assert (behind.was_at(800), behind.was_at(1_600)) == (True, False)


def test_a_long_computation_is_nowhere_exact_until_the_view_has_caught_up() -> None:
    first = VIEW.committed(FIRST, None)
    late = replace(VIEW, position=1_600).committed(THIRD, first)
    assert [late.was_at(position) for position in (800, 1_600, 2_400)] == [False] * 3

    again = Committed(position=2_401, cut=2_400, last_cut=2_400)
    caught_up = replace(VIEW, position=2_400).committed(again, late)
    assert [caught_up.was_at(position) for position in (800, 1_600, 2_400, 2_401)] == [False, False, False, True]


def test_a_view_that_was_not_computed_at_the_last_cut_begins_again() -> None:
    first = VIEW.committed(FIRST, None)
    refreshed = replace(VIEW, position=2_400).committed(THIRD, first)

    assert (refreshed.was_at(1_600), refreshed.was_at(2_400)) == (False, True)


def test_another_definition_of_a_view_begins_again() -> None:
    first = VIEW.committed(FIRST, None)
    changed = replace(VIEW, fingerprint="g", position=1_600).committed(SECOND, first)

    assert (changed.was_at(800), changed.was_at(1_600)) == (False, True)


def test_views_are_read_as_they_were_written_and_those_of_earlier_releases_are_nowhere_exact() -> None:
    written = ComputedFrom(800, {"shop.v": VIEW.committed(FIRST, None)})
    read = ComputedFrom.from_json(written.to_json())
    earlier = ComputedFrom.from_json(written.to_json().replace('"followed_from": 800, ', ""))

    assert read == written
    assert [read.was_at(view, 800) for view in ("shop.v", "shop.w")] == [True, False]
    assert not earlier.was_at("shop.v", 800)
