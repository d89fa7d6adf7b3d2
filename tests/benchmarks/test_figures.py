"""Figures: when a bar is kept."""

from __future__ import annotations

from tests.benchmarks.figures import Figure


def test_the_median_keeps_a_bar() -> None:
    assert Figure("ms", at_most=10, values=[1, 10, 99]).holds is True
    assert Figure("ms", at_most=10, values=[1, 11, 99]).holds is False
    assert Figure("1/s", at_least=10, values=[1, 10, 99]).holds is True


def test_a_bar_of_every_run_is_not_kept_by_the_median_alone() -> None:
    assert Figure("rows", at_most=0, in_every_run=True, values=[0, 0, 1]).holds is False
    assert Figure("rows", at_most=0, in_every_run=True, values=[0, 0, 0]).holds is True
    assert Figure("tx/s", at_least=950, in_every_run=True, values=[990, 990, 940]).holds is False


def test_nothing_is_said_of_a_figure_that_was_not_measured() -> None:
    assert Figure("rows", at_most=0, in_every_run=True).holds is None
    assert Figure("ms", values=[1]).holds is None


def test_a_limit_is_written_in_full() -> None:
    assert Figure("rows/s", at_least=2e6).limit == "≥ 2,000,000"
    assert Figure("ratio", at_most=0.05).limit == "≤ 0.05"
    assert not Figure("s").limit
