"""Routes about the log: its contents, compaction, vacuum and verification. Each has its command in `cdc`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request

from cdc.catalog.commands import COMPACT
from cdc.errors import StateConflict, UnknownName
from cdc.service.api.copies import ACCEPTED, JobPath, PipelineApi, PipelinePath, RequestBody, actor_of
from cdc.service.compaction_requests import request_compaction
from cdc.service.log_check import MAX_BYTES, LogCheck, check_log
from cdc.service.log_status import FileLine, LogStatus, SegmentLine, Transaction, VacuumReport

MAX_ROWS: Final = 10_000
"""Rows of a transaction that one answer may contain."""

SegmentPath = Annotated[int, Path(description="Number of the segment.", ge=0)]
RunPath = Annotated[int, Path(description="Number of the run.", ge=0)]
PositionQuery = Annotated[
    str, Query(description="Position as 16/B374D848, or 2:16/B374D848 in epoch 2.", max_length=40)
]
RowsQuery = Annotated[int, Query(description="Number of rows to return, the first ones.", ge=0, le=MAX_ROWS)]
MostQuery = Annotated[int, Query(description="Bytes of data files to read, the newest ones.", ge=0, le=MAX_BYTES)]


class CompactBody(RequestBody):
    """What to compact."""

    everything: bool = False
    """Also compact the segment that is being written, up to the log's end."""


class GcBody(RequestBody):
    """Options of a vacuum."""

    dry_run: bool = False
    """Report what would be removed, and remove nothing."""


@dataclass(frozen=True, slots=True)
class CompactionJob:
    """A requested compaction."""

    id: int
    state: str
    """pending | done | failed."""
    summary: str | None
    """Result in one line, once it is done."""
    error: dict[str, Any] | None
    """Code, message and suggestion, if it failed."""


def log_routes(api: PipelineApi) -> APIRouter:
    """Every route of this module."""
    routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["log"])
    for add in (_add_status, _add_inspect, _add_verify, _add_compact, _add_gc):
        add(routes, api)
    return routes


def _add_status(routes: APIRouter, api: PipelineApi) -> None:
    @routes.get("/log")
    def log(pipeline: PipelinePath) -> LogStatus:
        """Bytes before and after compaction, segments, runs, horizon, floor, oldest change, consumers."""
        api.check_pipeline(pipeline)
        status: LogStatus = _status_reader().log_status(api.definition.log.root, _open_log(api), datetime.now(UTC))
        return status

    @routes.get("/log/segments")
    def segments(pipeline: PipelinePath) -> list[SegmentLine]:
        """Every segment of single changes, oldest first (`cdc log ls`)."""
        api.check_pipeline(pipeline)
        lines: list[SegmentLine] = _status_reader().segment_lines(_open_log(api))
        return lines

    @routes.get("/log/segments/{segment}/files")
    def files_of_segment(pipeline: PipelinePath, segment: SegmentPath) -> list[FileLine]:
        """The data files of a segment, in order of position (`cdc log ls --files`)."""
        api.check_pipeline(pipeline)
        lines: list[FileLine] = _status_reader().files_of_segment(_open_log(api), segment)
        return lines

    @routes.get("/log/runs/{run}/files")
    def files_of_run(pipeline: PipelinePath, run: RunPath) -> list[FileLine]:
        """The data files of a run of the compacted log (`cdc log ls --files`)."""
        api.check_pipeline(pipeline)
        lines: list[FileLine] = _status_reader().files_of_run(api.definition.log.root, _open_log(api), run)
        return lines


def _add_inspect(routes: APIRouter, api: PipelineApi) -> None:
    @routes.get("/log/inspect")
    def inspect(pipeline: PipelinePath, position: PositionQuery, most: RowsQuery = 1_000) -> Transaction:
        """The rows of one transaction without their values (`cdc log inspect POSITION`); 404 if there is none."""
        api.check_pipeline(pipeline)
        found: Transaction = import_module("cdc.service.transaction_view").transaction(_open_log(api), position, most)
        return found


def _add_compact(routes: APIRouter, api: PipelineApi) -> None:
    @routes.post("/log/compact", status_code=ACCEPTED)
    def compact(pipeline: PipelinePath, body: CompactBody, request: Request) -> CompactionJob:
        """Let the apply process compact the log now (`cdc log compact`); 409 while none runs."""
        api.check_pipeline(pipeline)
        number = request_compaction(api.catalog, pipeline, everything=body.everything)
        if number is None:
            raise StateConflict("no apply process is running", remedy="start it, or run 'cdc log compact'")
        api.catalog.audit.write(actor_of(request), "log.compact", pipeline, {"everything": body.everything})
        return _compaction(api, pipeline, number)

    @routes.get("/log/compact/{job}")
    def compaction(pipeline: PipelinePath, job: JobPath) -> CompactionJob:
        """State of a requested compaction."""
        api.check_pipeline(pipeline)
        return _compaction(api, pipeline, job)


def _add_gc(routes: APIRouter, api: PipelineApi) -> None:
    @routes.post("/log/gc")
    def gc(pipeline: PipelinePath, body: GcBody, request: Request) -> VacuumReport:
        """Delete files whose grace is over, and let the reader drop segments (`cdc log gc`)."""
        api.check_pipeline(pipeline)
        collected: VacuumReport = import_module("cdc.service.log_vacuum").vacuum_log(
            api.definition, dry_run=body.dry_run
        )
        if not body.dry_run:
            api.catalog.audit.write(actor_of(request), "log.gc", pipeline, asdict(collected))
        return collected


def _add_verify(routes: APIRouter, api: PipelineApi) -> None:
    @routes.get("/log/verify")
    def verify(pipeline: PipelinePath, most: MostQuery = MAX_BYTES // 4) -> LogCheck:
        """Whether commits, files and the newest rows are as they were written (`cdc log verify` reads all of them)."""
        api.check_pipeline(pipeline)
        return check_log(api.definition, most)


def _compaction(api: PipelineApi, pipeline: str, number: int) -> CompactionJob:
    found = api.catalog.commands.get(number)
    if found is None or found.kind != COMPACT or found.pipeline != pipeline:
        raise UnknownName(f"no compaction has the number {number}", remedy="POST to /log/compact starts one")
    result = found.result or {}
    return CompactionJob(number, found.state.value, result.get("summary"), result.get("error"))


def _open_log(api: PipelineApi) -> Any:
    return _status_reader().open_log(api.definition.log.root)


def _status_reader() -> Any:
    # loaded on the first request, as in copies
    return import_module("cdc.service.log_status_reader")
