"""Routes about the consumers of the log, as `cdc consumers`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Annotated

from fastapi import APIRouter, Path, Request

from cdc.errors import UnknownName
from cdc.service.api.copies import ACCEPTED, EmptyBody, PipelineApi, PipelinePath, actor_of
from cdc.service.log_status import ConsumerLine

ConsumerPath = Annotated[str, Path(description="UUID of the consumer.")]


@dataclass(frozen=True, slots=True)
class ConsumerForgotten:
    """A forgotten consumer: the log is trimmed without it."""

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
    known_by_uuid = {consumer.uuid: (consumer.name, str(consumer.position)) for consumer in known}
    known_by_uuid |= {broken_uuid: (broken_uuid, None) for broken_uuid in broken}
    if uuid not in known_by_uuid:
        raise UnknownName(
            f"no consumer of the log has the UUID {uuid!r}",
            remedy=f"GET /api/v1/pipelines/{api.definition.name}/consumers lists them",
        )
    name, position = known_by_uuid[uuid]
    consumers.forget(root, uuid)
    api.catalog.audit.write(actor, "consumers.forget", name, {"uuid": uuid, "position": position})
    return ConsumerForgotten(uuid, name)
