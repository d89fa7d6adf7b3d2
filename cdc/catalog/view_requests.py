"""Requests to compute a view as a whole, from the command line to the apply process."""

from __future__ import annotations

from typing import Final

from cdc.catalog import Catalog

REFRESH_VIEW: Final = "refresh_view"
"""Kind of the command that asks for a whole computation of a view; its payload is {"view": name}."""


def request_refresh(catalog: Catalog, pipeline: str, view: str, actor: str) -> None:
    """Ask the apply process to compute a view as a whole."""
    catalog.commands.post(pipeline, REFRESH_VIEW, {"view": view})
    catalog.audit.write(actor, "view refresh", pipeline, {"view": view})


def take_refreshes(catalog: Catalog, pipeline: str) -> list[str]:
    """Return the views that somebody asked to compute, and answer the requests."""
    commands = catalog.commands.pending(pipeline, REFRESH_VIEW)
    for command in commands:
        catalog.commands.finish(command.id, {})
    return [command.payload["view"] for command in commands]
