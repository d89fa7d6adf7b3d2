"""The demo's line of lags: a figure where it is one of now, else what the pipeline does, or how long it shows none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cdc.catalog import AWAITS_SPARK
from cdc.demo.pipeline_probe import FIND, LAKE, PipelineSnapshot
from cdc.service.status import COMPILES

NAMES: Final = {FIND: "search", LAKE: "delta"}
"""Sinks as the line calls them, in its order."""
OLD_AFTER: Final = 5.0
"""Seconds without a new figure, while there is something to apply, after which the last one is not shown any more."""
AWAITS_LOG: Final = "waits for the log"
NO_ROWS: Final = "no rows yet"


def lag_line(sight: PipelineSnapshot, sinks: Sequence[str]) -> str:
    """`log 0.05 s · search 0.41 s · delta 0.72 s`, and why they are long if this machine is the reason."""
    parts = [
        f"log {_of_log(sight)}",
        *(f"{name} {_of_sink(sight, sink)}" for sink, name in NAMES.items() if sink in sinks),
    ]
    line = " · ".join(parts)
    return f"{line}     {sight.slow}" if sight.slow else line


def _of_log(sight: PipelineSnapshot) -> str:
    if sight.compiling:
        return COMPILES
    return _figure(sight.source_lag, sight.stalled.get("", 0.0))


def _of_sink(sight: PipelineSnapshot, sink: str) -> str:
    stalled = sight.stalled.get(sink, 0.0)
    if sink not in sight.sinks:
        return AWAITS_SPARK if sink == LAKE else NO_ROWS
    if sight.reasons.get(sink) == AWAITS_SPARK:
        return AWAITS_SPARK
    if sight.compiling and stalled <= OLD_AFTER:
        return AWAITS_LOG
    return _figure(sight.lag.get(sink), stalled)


def _figure(lag: float | None, stalled: float) -> str:
    if stalled > OLD_AFTER:
        return f"no figure for {stalled:.0f} s"
    return "–" if lag is None else f"{lag:.2f} s"
