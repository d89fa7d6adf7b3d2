"""The demo's line of lags: a present lag, or what the pipeline does instead, or how long there is no new value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cdc.catalog import AWAITS_SPARK
from cdc.demo.pipeline_probe import LAKE, SEARCH, PipelineSnapshot
from cdc.service.status import COMPILING_ACTIVITY

NAMES: Final = {SEARCH: "search", LAKE: "delta"}
"""Names of the sinks on the line, in its order."""
OLD_AFTER: Final = 5.0
"""Seconds without a new lag, while there is something to apply, after which the last one is not shown."""
AWAITS_LOG: Final = "waits for the log"
NO_ROWS: Final = "no rows yet"


def lag_line(snapshot: PipelineSnapshot, sinks: Sequence[str]) -> str:
    """`log 0.05 s · search 0.41 s · delta 0.72 s`, and the reason if this machine is too slow."""
    parts = [
        f"log {_log_lag(snapshot)}",
        *(f"{name} {_sink_lag(snapshot, sink)}" for sink, name in NAMES.items() if sink in sinks),
    ]
    line = " · ".join(parts)
    return f"{line}     {snapshot.slow}" if snapshot.slow else line


def _log_lag(snapshot: PipelineSnapshot) -> str:
    if snapshot.compiling:
        return COMPILING_ACTIVITY
    return _lag_text(snapshot.source_lag, snapshot.stalled.get("", 0.0))


def _sink_lag(snapshot: PipelineSnapshot, sink: str) -> str:
    stalled = snapshot.stalled.get(sink, 0.0)
    if sink not in snapshot.sinks:
        return AWAITS_SPARK if sink == LAKE else NO_ROWS
    if snapshot.reasons.get(sink) == AWAITS_SPARK:
        return AWAITS_SPARK
    if snapshot.compiling and stalled <= OLD_AFTER:
        return AWAITS_LOG
    return _lag_text(snapshot.lag.get(sink), stalled)


def _lag_text(lag: float | None, stalled: float) -> str:
    if stalled > OLD_AFTER:
        return f"no new value for {stalled:.0f} s"
    return "–" if lag is None else f"{lag:.2f} s"
