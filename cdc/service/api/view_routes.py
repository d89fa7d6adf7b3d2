"""Routes that list, pause, resume and compute views, as `cdc views` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path

from cdc.catalog.view_requests import VIEW_PAUSES, request_refresh
from cdc.catalog.view_summary import ViewSummary, check_view_name, view_summaries
from cdc.service.api.route_context import ACCEPTED, Actor, Context, EmptyBody

ViewPath = Annotated[str, Path(description="Topic of the view, `schema.table`.")]


@dataclass(frozen=True, slots=True)
class ViewChange:
    """Result of a request to pause or resume a view."""

    view: str
    changed: bool
    """False if the view was in the requested state already."""


@dataclass(frozen=True, slots=True)
class RefreshRequest:
    """An accepted request to compute a view as a whole; the apply process carries it out."""

    view: str


routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["views"])
"""The routes about views."""


@routes.get("/views")
def views(context: Context) -> list[ViewSummary]:
    """Return every view of the pipeline (`cdc views ls`)."""
    return view_summaries(context.definition, context.catalog)


@routes.post("/views/{view}/pause")
def pause_view(context: Context, view: ViewPath, _body: EmptyBody, actor: Actor) -> ViewChange:
    """Pause a view until it is resumed (`cdc views pause`)."""
    check_view_name(context.definition, view)
    return ViewChange(view, VIEW_PAUSES.pause(context.catalog, context.name, view, actor))


@routes.post("/views/{view}/resume")
def resume_view(context: Context, view: ViewPath, _body: EmptyBody, actor: Actor) -> ViewChange:
    """Let a paused view continue (`cdc views resume`)."""
    check_view_name(context.definition, view)
    return ViewChange(view, VIEW_PAUSES.resume(context.catalog, context.name, view, actor))


@routes.post("/views/{view}/refresh", status_code=ACCEPTED)
def refresh_view(context: Context, view: ViewPath, _body: EmptyBody, actor: Actor) -> RefreshRequest:
    """Compute a view as a whole at the next cut (`cdc views refresh`)."""
    check_view_name(context.definition, view)
    request_refresh(context.catalog, context.name, view, actor)
    return RefreshRequest(view)
