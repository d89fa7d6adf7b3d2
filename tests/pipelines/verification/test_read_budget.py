"""The budget of continuous verification, with clocks of the test."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pipelines.verification.read_budget import ReadBudget


@dataclass
class Clocks:
    """Time and processor time."""

    now: float = 0.0
    cpu: float = 3.0

    def cut(self, budget: ReadBudget, *, rows: int, seconds: float, cpu: float) -> float:
        """Read rows in some seconds, and rest as long as the budget says."""
        self.now += seconds
        self.cpu += cpu
        rest = budget.rest_after(rows, seconds)
        self.now += rest
        return rest


def test_on_average_no_more_than_the_budget_is_used() -> None:
    clocks = Clocks()
    budget = ReadBudget(1000, 0.01, lambda: clocks.now, lambda: clocks.cpu)
    for _ in range(20):
        clocks.cut(budget, rows=500, seconds=0.3, cpu=0.5)
    assert (clocks.cpu - 3.0) / clocks.now == pytest.approx(0.01, rel=0.01)
    clocks.now += 1e6  # a long time without a cut is no credit for later ones
    assert clocks.cut(budget, rows=500, seconds=0.3, cpu=0.5) == pytest.approx(50, abs=0.5)


def test_the_scarcest_limit_counts() -> None:
    clocks = Clocks()
    budget = ReadBudget(1000, 0.5, lambda: clocks.now, lambda: clocks.cpu)
    assert clocks.cut(budget, rows=60_000, seconds=0.5, cpu=0.1) == pytest.approx(59.5)  # rows
    assert clocks.cut(budget, rows=10, seconds=5.0, cpu=0.1) == pytest.approx(5.0)  # the source's processor
    assert clocks.cut(budget, rows=10, seconds=0.5, cpu=4.0) == pytest.approx(7.5)  # this process


def test_without_limits_there_is_no_rest() -> None:
    assert ReadBudget().rest_after(10**9, 60.0) == 0
