"""The demo's output: permanent lines, status lines that are overwritten, and the line of lags."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest

from cdc.catalog import AWAITS_SPARK
from cdc.demo.pipeline_observer import LAKE, SEARCH, PipelineSnapshot
from cdc.demo.terminal import Terminal, lag_line
from cdc.position import Position

BOTH = (LAKE, SEARCH)
HEALTHY = PipelineSnapshot(
    durable=Position(9),
    sinks={LAKE: Position(7), SEARCH: Position(8)},
    lag={LAKE: 0.72, SEARCH: 0.41},
    source_lag=0.05,
    slot_retained=None,
    versions={},
    stalled={"": 0.1, LAKE: 0.6, SEARCH: 0.3},
)


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


def test_sinks_that_move_have_their_lag() -> None:
    assert lag_line(HEALTHY, BOTH) == "log 0.05 s · search 0.41 s · delta 0.72 s"
    assert lag_line(HEALTHY, ()) == "log 0.05 s"


def test_a_sink_that_shows_nothing_new_for_seconds_has_no_figure_but_that() -> None:
    late = replace(HEALTHY, lag={LAKE: 30.66, SEARCH: 0.41}, stalled={"": 0.1, LAKE: 26.0, SEARCH: 0.3})
    assert lag_line(late, BOTH) == "log 0.05 s · search 0.41 s · delta no new value for 26 s"


def test_a_log_that_gets_nothing_new_has_no_figure_but_that() -> None:
    assert lag_line(replace(HEALTHY, stalled={"": 12.0}), ()) == "log no new value for 12 s"


def test_while_the_reader_compiles_its_time_is_no_lag() -> None:
    line = lag_line(replace(HEALTHY, compiling=True, source_lag=11.2, stalled={"": 11.0}), BOTH)
    assert line == ("log compiles its decoder, once per machine · search waits for the log · delta waits for the log")


@pytest.mark.parametrize(
    "snapshot",
    [
        replace(HEALTHY, sinks={SEARCH: Position(8)}, lag={SEARCH: 0.41}),
        replace(HEALTHY, reasons={LAKE: AWAITS_SPARK}, lag={LAKE: 30.66, SEARCH: 0.41}),
    ],
    ids=["before its first rows", "after them"],
)
def test_a_sink_that_can_do_nothing_without_spark_says_so(snapshot: PipelineSnapshot) -> None:
    assert lag_line(snapshot, BOTH) == "log 0.05 s · search 0.41 s · delta waits for Spark"


def test_a_lag_that_this_machine_is_the_reason_of_is_shown_with_it() -> None:
    slow = "this machine is too slow for the present rate of changes: the pipeline uses 1.8 of 2 cores"
    assert lag_line(replace(HEALTHY, slow=slow), BOTH).endswith(f"delta 0.72 s     {slow}")
