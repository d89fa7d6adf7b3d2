"""Routes about proof: through when each table equals the source, and a comparison now, as `cdc verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field

from cdc.config.verify_options import Against, VerifyMode
from cdc.errors import ConfigError
from cdc.service.api.copies import ACCEPTED, PipelineApi, PipelinePath, RequestBody, Text, actor_of
from cdc.service.verification_jobs import VerificationJobs, VerifyRequest, VerifyStatus
from cdc.service.verification_status import VerifiedStatus, verified_statuses


class VerifyBody(RequestBody):
    """What to compare, and how closely; `{}` is every row of every sink."""

    tables: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    """Globs of `schema.table`; none is all."""
    sinks: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    """As the definition names them; none is all."""
    mode: VerifyMode = VerifyMode.ROWS
    """rows | checksum | count."""
    against: Against = Against.SOURCE
    """source | log."""
    repair: bool = False
    """Have the rows that differ read again, by key, then compare again."""


@dataclass(frozen=True, slots=True)
class VerificationBody:
    """What is known."""

    tables: tuple[VerifiedStatus, ...]
    """Every table of a sink that was ever compared with the source."""
    last: VerifyStatus | None
    """The newest comparison that was asked for here, on its way or ended."""


def verification_routes(api: PipelineApi, verifications: VerificationJobs) -> APIRouter:
    """Every route of this module."""
    routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["verify"])

    @routes.post("/verify", status_code=ACCEPTED)
    def verify(pipeline: PipelinePath, body: VerifyBody, request: Request) -> VerifyStatus:
        """Compare sinks with the source or the log, in a child of this server (`cdc verify`); 409 while one runs."""
        api.check_pipeline(pipeline)
        for sink in body.sinks:
            api.check_sink(pipeline, sink)
        if body.repair and body.against is Against.LOG:
            raise ConfigError("repair reads the source again, and against 'log' leaves it alone")
        wanted = VerifyRequest(
            tables=body.tables,
            sinks=body.sinks,
            mode=body.mode,
            against=body.against,
            repair=body.repair,
        )
        return verifications.start(wanted, actor_of(request))

    @routes.get("/verify")
    def verified(pipeline: PipelinePath) -> VerificationBody:
        """Through when each table is verified (`cdc status`), and what came of the last comparison asked for here."""
        api.check_pipeline(pipeline)
        return VerificationBody(verified_statuses(api.catalog.verified.ls(pipeline)), verifications.last())

    return routes
