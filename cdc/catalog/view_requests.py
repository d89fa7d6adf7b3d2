"""Requests about views, from command line and API to the apply process: compute one as a whole, pause, resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cdc.catalog import Catalog
from cdc.catalog.pause_requests import PauseRequests

VIEW_PAUSES: Final = PauseRequests("pause_view", "view")
REFRESH_VIEW: Final = "refresh_view"
"""Kind of the command that asks for a whole computation of a view; its payload is {"view": name}."""


@dataclass(frozen=True, slots=True)
class ViewRequests:
    """What people asked of the views of a pipeline."""

    refreshes: tuple[str, ...] = ()
    """Views to compute as a whole; each request is answered once."""
    paused: frozenset[str] = frozenset()
    """Views that are paused at present."""


def request_refresh(catalog: Catalog, pipeline: str, view: str, actor: str) -> None:
    """Ask the apply process to compute a view as a whole."""
    catalog.commands.post(pipeline, REFRESH_VIEW, {"view": view})
    catalog.audit.write(actor, "view refresh", pipeline, {"view": view})


def take_requests(catalog: Catalog, pipeline: str) -> ViewRequests:
    """Return what was asked, and answer the requests to compute a view."""
    commands = catalog.commands.pending(pipeline, REFRESH_VIEW)
    for command in commands:
        catalog.commands.finish(command.id, {})
    refreshes = tuple(command.payload["view"] for command in commands)
    return ViewRequests(refreshes, VIEW_PAUSES.paused(catalog, pipeline))
