"""Routes that list, pause, resume and rewind deliveries, as `cdc deliveries` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path

from cdc.catalog import delivery_requests
from cdc.catalog.delivery_requests import DELIVERY_PAUSES
from cdc.delivery.delivery_summary import DeliverySummary, check_name, summaries
from cdc.position import Position
from cdc.service.api.route_context import ACCEPTED, Actor, Context, EmptyBody, RequestBody, Text

DeliveryPath = Annotated[str, Path(description="Name of the delivery.", min_length=1, max_length=40)]


class RewindBody(RequestBody):
    """Body of a request to send a range of the log again."""

    position: Text
    """Position after which the delivery continues, such as `16/B374D848`; `0/0` is the beginning."""


@dataclass(frozen=True, slots=True)
class DeliveryChange:
    """Result of a request to pause or resume a delivery."""

    delivery: str
    changed: bool
    """False if the delivery was in the requested state already."""


@dataclass(frozen=True, slots=True)
class RewindRequest:
    """An accepted request to rewind a delivery; its process carries it out."""

    id: int
    """Number of the command."""
    delivery: str
    position: str


routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["deliveries"])
"""The routes about deliveries."""


@routes.get("/deliveries")
def deliveries(context: Context) -> list[DeliverySummary]:
    """Return every delivery of the pipeline (`cdc deliveries ls`)."""
    return summaries(context.definition, context.catalog)


@routes.post("/deliveries/{delivery}/pause")
def pause_delivery(context: Context, delivery: DeliveryPath, _body: EmptyBody, actor: Actor) -> DeliveryChange:
    """Pause a delivery until it is resumed (`cdc deliveries pause`)."""
    check_name(context.definition, delivery)
    return DeliveryChange(delivery, DELIVERY_PAUSES.pause(context.catalog, context.name, delivery, actor))


@routes.post("/deliveries/{delivery}/resume")
def resume_delivery(context: Context, delivery: DeliveryPath, _body: EmptyBody, actor: Actor) -> DeliveryChange:
    """Let a paused delivery continue (`cdc deliveries resume`)."""
    check_name(context.definition, delivery)
    return DeliveryChange(delivery, DELIVERY_PAUSES.resume(context.catalog, context.name, delivery, actor))


@routes.post("/deliveries/{delivery}/rewind", status_code=ACCEPTED)
def rewind_delivery(context: Context, delivery: DeliveryPath, body: RewindBody, actor: Actor) -> RewindRequest:
    """Send everything after a position again, with the same ids (`cdc deliveries rewind`)."""
    check_name(context.definition, delivery)
    position = str(Position.parse(body.position))
    number = delivery_requests.request_rewind(context.catalog, context.name, delivery, position, actor)
    return RewindRequest(number, delivery, position)
