"""Drawings of the page: coordinates of the lag curve and of the bar of sizes."""

from __future__ import annotations

from cdc.service.page.chart_coordinates import BAR_WIDTH, MIN_PART_WIDTH, bar_parts, lag_curve


def test_a_curve_without_lags_has_no_points() -> None:
    curve = lag_curve([], "lag log to lake")
    assert (curve.line, curve.label) == ("", "lag log to lake: no values yet")


def test_a_curve_ends_at_the_newest_lag_and_names_the_worst() -> None:
    curve = lag_curve([0.5, 4.0, 1.0], "lag")
    assert curve.label == "lag: now 1.00 s, worst 4.00 s"
    assert curve.line.split()[-1] == curve.end
    assert [point.partition(",")[2] for point in curve.line.split()] == ["29.2", "3.0", "25.5"]


def test_lags_far_below_a_second_look_flat() -> None:
    heights = [float(point.partition(",")[2]) for point in lag_curve([0.01, 0.02], "lag").line.split()]
    assert max(heights) - min(heights) < 1


def test_one_lag_is_a_line() -> None:
    assert len(lag_curve([2.0], "lag").line.split()) == 2


def test_parts_of_a_bar_are_side_by_side_and_a_small_one_stays_visible() -> None:
    large, none, small = bar_parts({"changes": 1_000_000, "compacted": 0, "leaving": 1})
    assert (large.left, round(large.width), none.width) == (0.0, BAR_WIDTH, 0.0)
    assert (small.left, small.width) == (large.width, MIN_PART_WIDTH)
