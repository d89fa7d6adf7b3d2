"""Routes about verification: up to when each table equals the source, and a comparison now, as `cdc verify`."""

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
    """What to compare, and how; `{}` means every row of every sink."""

    tables: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    """Globs of `schema.table`; empty means all."""
    sinks: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    """Names of sinks; empty means all."""
    mode: VerifyMode = VerifyMode.ROWS
    """rows | checksum | count."""
    against: Against = Against.SOURCE
    """source | log."""
    repair: bool = False
    """Read rows that differ again by key, then compare again."""


@dataclass(frozen=True, slots=True)
class VerificationBody:
    """Verification results."""

    tables: tuple[VerifiedStatus, ...]
    """Every table of a sink that was compared with the source at least once."""
    last: VerifyStatus | None
    """The newest verification that was started over the API."""


def verification_routes(api: PipelineApi, verifications: VerificationJobs) -> APIRouter:
    """Every route of this module."""
    routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["verify"])

    @routes.post("/verify", status_code=ACCEPTED)
    def verify(pipeline: PipelinePath, body: VerifyBody, request: Request) -> VerifyStatus:
        """Compare sinks with the source or the log in a child process (`cdc verify`); 409 while one runs."""
        api.check_pipeline(pipeline)
        for sink in body.sinks:
            api.check_sink(pipeline, sink)
        if body.repair and body.against is Against.LOG:
            raise ConfigError("repair needs the source, and against 'log' does not read it")
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
        """Up to when each table is verified (`cdc status`), and the last verification that was started here."""
        api.check_pipeline(pipeline)
        return VerificationBody(verified_statuses(api.catalog.verified.ls(pipeline)), verifications.last())

    return routes
