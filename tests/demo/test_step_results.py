"""Steps of the demo: a step that raises is printed and fails; a wait that takes too long names its condition."""

from __future__ import annotations

from io import StringIO

import pytest

from cdc.demo.step_results import StepResult, Wait, run_step
from cdc.demo.terminal import Terminal
from cdc.errors import CutUnavailable, PositionNotReached


def test_a_step_that_raises_is_printed_with_its_code_and_fails() -> None:
    def fails() -> StepResult:
        raise CutUnavailable("no cut is kept")

    out = StringIO()
    step = run_step(Terminal(out), "cut", fails)

    assert not step.equal
    assert "✗ cut        CDC-3014 no cut is kept   try: " in out.getvalue() or "no cut is kept" in out.getvalue()
    assert step.facts["error"] == CutUnavailable("no cut is kept").to_json()


@pytest.mark.parametrize(("equal", "mark"), [(True, "✓"), (False, "✗")])
def test_a_step_is_printed_with_its_command_and_its_mark(equal: bool, mark: str) -> None:
    out = StringIO()
    step = run_step(Terminal(out), "cut", lambda: StepResult("all there", "cdc query", equal, 3))

    assert f"{mark} cut        all there   try: cdc query\n" in out.getvalue()
    assert (step.name, step.rows, step.equal) == ("cut", 3, equal)


def test_a_long_command_is_printed_on_its_own_line_below_the_text() -> None:
    out = StringIO()
    run_step(Terminal(out), "cut", lambda: StepResult("text", "cdc query " + "x" * 110, equal=True))
    first, second = out.getvalue().splitlines()

    assert first.endswith("text")
    assert second.index("try:") == first.index("text")


def test_a_wait_returns_the_value_or_fails_with_the_condition() -> None:
    answers = iter([None, 7])

    assert Wait(Terminal(StringIO()), "lake").until("a number", lambda: next(answers)) == 7
    with pytest.raises(PositionNotReached, match="the demo waited 0 s, but this did not happen: a number"):
        Wait(Terminal(StringIO()), "lake", 0.0).until("a number", lambda: None)
