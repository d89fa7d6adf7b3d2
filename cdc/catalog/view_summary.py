"""What commands and API show of each view: its definition, and what the catalog has of the process that computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cdc import metrics
from cdc.catalog import Catalog
from cdc.catalog.view_requests import VIEW_PAUSES
from cdc.config import Definition
from cdc.config.views import NAME_OF_VIEWS
from cdc.errors import UnknownName
from cdc.position import Position

MODES: Final = ("incremental", "whole")
"""How a view can be computed; values of the label `mode` of its metrics."""


@dataclass(frozen=True, slots=True)
class ViewSummary:
    """One view of a pipeline. Numbers count from the start of the process that computes it."""

    name: str
    key: tuple[str, ...]
    sql: str
    state: str
    """not started | streaming | snapshotting (waits for its tables) | catching_up (takes long) | paused | failed."""
    reason: str | None
    """Why the view is not up to date."""
    paused: bool
    """True if somebody has paused the view; the process notices it within a second, at its next cut."""
    position: str | None
    """Position of the tables of which its rows are the result."""
    rows: int
    """Number of changes that were logged."""
    input_rows: int
    """Number of changed rows of tables from which it was computed."""
    affected_keys: int
    """Number of keys whose rows were computed."""
    keys_left: int | None
    """Number of keys that the running computation has not done yet; None: not known, as while the whole view is
    computed."""
    seconds_left: float | None
    """Estimated seconds that they take; None: not known."""
    computations: dict[str, int]
    """Number of computations, incremental and as a whole."""
    seconds: dict[str, float]
    """Seconds that they took."""


def view_summaries(definition: Definition, catalog: Catalog) -> list[ViewSummary]:
    """Return every view of a definition."""
    reported = {one.topic: one for one in catalog.tables.ls(definition.name) if one.sink == NAME_OF_VIEWS}
    paused = VIEW_PAUSES.paused(catalog, definition.name)
    figures = {
        (name, *labels): value
        for process in catalog.processes.ls(definition.name)
        if process.process == "apply"
        for name, labels, value in process.figures
    }
    found = []
    for view in definition.views:
        progress, labels = reported.get(view.name), (definition.name, view.name)
        keys_left = figures.get((metrics.VIEW_KEYS_LEFT.name, *labels))
        seconds_left = figures.get((metrics.VIEW_SECONDS_LEFT.name, *labels))
        found.append(
            ViewSummary(
                name=view.name,
                key=view.key,
                sql=view.sql,
                state="not started" if progress is None else progress.state,
                reason=None if progress is None else progress.reason,
                paused=view.name in paused,
                position=None if progress is None else str(Position(progress.position)),
                rows=0 if progress is None else progress.rows,
                input_rows=int(figures.get((metrics.VIEW_INPUT_ROWS.name, *labels), 0)),
                affected_keys=int(figures.get((metrics.VIEW_AFFECTED_KEYS.name, *labels), 0)),
                keys_left=None if keys_left is None else int(keys_left),
                seconds_left=None if seconds_left is None else round(seconds_left, 1),
                computations={
                    mode: int(figures.get((metrics.VIEW_COMPUTATIONS.name, *labels, mode), 0)) for mode in MODES
                },
                seconds={
                    mode: round(figures.get((metrics.VIEW_SECONDS.name, *labels, mode), 0.0), 3) for mode in MODES
                },
            )
        )
    return found


def check_view_name(definition: Definition, name: str) -> None:
    """Raise UnknownName if the definition has no view with this name."""
    known = [view.name for view in definition.views]
    if name not in known:
        names = ", ".join(map(repr, known)) or "none"
        raise UnknownName(f"pipeline {definition.name!r} has no view {name!r}", remedy=f"this definition has: {names}")
