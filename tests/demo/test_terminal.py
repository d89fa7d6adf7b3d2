"""Terminal: what stays, stays; figures pass."""

from __future__ import annotations

from io import StringIO

from cdc.demo.terminal import Terminal


class TerminalText(StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_figures_are_written_over_on_a_terminal() -> None:
    out = TerminalText()
    screen = Terminal(out)
    screen.update("lag 1 s")
    screen.update("lag 2 s")
    screen.done("log", "is there")

    assert out.getvalue().count("\n") == 1
    assert out.getvalue().splitlines()[-1].endswith("✓ log        is there")


def test_figures_are_lines_elsewhere() -> None:
    out = StringIO()
    Terminal(out).update("lag 1 s")

    assert out.getvalue().endswith("lag 1 s\n")


def test_a_line_begins_with_the_seconds_since_the_start() -> None:
    out = StringIO()
    Terminal(out, began=0.0).failed("delta", "is away")

    assert float(out.getvalue().split("s  ✗")[0]) > 0
