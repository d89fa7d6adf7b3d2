"""Routes about who reads the log, as `cdc consumers`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Annotated

from fastapi import APIRouter, Path, Request

from cdc.errors import UnknownName
from cdc.service.api.copies import ACCEPTED, EmptyBody, PipelineApi, PipelinePath, actor_of
from cdc.service.log_status import ConsumerLine

ConsumerPath = Annotated[str, Path(description="Its UUID.")]


@dataclass(frozen=True, slots=True)
class ConsumerForgotten:
    """A consumer that the log is trimmed without."""

    uuid: str
    name: str


def consumer_routes(api: PipelineApi) -> APIRouter:
    """Every route of this module."""
    routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["log"])

    @routes.get("/consumers")
    def consumers(pipeline: PipelinePath) -> list[ConsumerLine]:
        """Who reads the log, how far, and when each was last heard of (`cdc consumers ls`)."""
        api.check_pipeline(pipeline)
        lines: tuple[ConsumerLine, ...] = import_module("cdc.service.log_status_reader").consumer_lines(
            api.definition.log.root, datetime.now(UTC)
        )
        return list(lines)

    @routes.post("/consumers/{uuid}/forget", status_code=ACCEPTED)
    def forget(pipeline: PipelinePath, uuid: ConsumerPath, _body: EmptyBody, request: Request) -> ConsumerForgotten:
        """Let the log be trimmed without regard to a consumer (`cdc consumers forget`); one that runs comes back."""
        api.check_pipeline(pipeline)
        return _forget(api, uuid, actor_of(request))

    return routes


def _forget(api: PipelineApi, uuid: str, actor: str) -> ConsumerForgotten:
    root, consumers = api.definition.log.root, import_module("cdc.log.consumers")
    known, broken = consumers.list_readable_consumers(root)
    places = {consumer.uuid: (consumer.name, str(consumer.position)) for consumer in known}
    places |= {broken_uuid: (broken_uuid, None) for broken_uuid in broken}
    if uuid not in places:
        raise UnknownName(f"no consumer of the log has the UUID {uuid!r}", remedy="GET the consumers for what there is")
    name, position = places[uuid]
    consumers.forget(root, uuid)
    api.catalog.audit.write(actor, "consumers.forget", name, {"uuid": uuid, "position": position})
    return ConsumerForgotten(uuid, name)
