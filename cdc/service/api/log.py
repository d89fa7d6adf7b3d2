"""Routes about the log itself: what it keeps, a compaction now, letting go. Each has its command in `cdc`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request

from cdc.catalog.commands import COMPACT
from cdc.errors import StateConflict, UnknownName
from cdc.service.api.copies import ACCEPTED, BackfillRequestBody, CopyRoutes, JobPath, PipelinePath, actor_of
from cdc.service.compaction_requests import ask_compact
from cdc.service.log_check import MOST, LogCheck, log_check
from cdc.service.log_status import Collected, FileLine, LogStatus, SegmentLine, Transaction

MOST_ROWS: Final = 10_000
"""Rows of a transaction that one answer tells of."""

SegmentPath = Annotated[int, Path(description="Its number.", ge=0)]
RunPath = Annotated[int, Path(description="Its number.", ge=0)]
PositionQuery = Annotated[str, Query(description="As 16/B374D848, or 2:16/B374D848 in epoch 2.", max_length=40)]
RowsQuery = Annotated[int, Query(description="Rows to tell of, the first.", ge=0, le=MOST_ROWS)]
MostQuery = Annotated[int, Query(description="Bytes of data files to read, the newest.", ge=0, le=MOST)]


class CompactBody(BackfillRequestBody):
    """What to compact."""

    everything: bool = False
    """Also the segment that is being written, up to the log's end."""


class GcBody(BackfillRequestBody):
    """What to let go of."""

    dry_run: bool = False
    """Say what would go, and take nothing away."""


@dataclass(frozen=True, slots=True)
class CompactionJob:
    """A compaction that was asked for."""

    id: int
    state: str
    """pending | done | failed."""
    summary: str | None
    """One line, once it is done."""
    error: dict[str, Any] | None
    """code, message and suggestion, if it failed."""


def log_routes(desk: CopyRoutes) -> APIRouter:
    """Every route of this module."""
    routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["log"])
    for add in (_add_looks, _add_inspect, _add_verify, _add_compact, _add_gc):
        add(routes, desk)
    return routes


def _add_looks(routes: APIRouter, desk: CopyRoutes) -> None:
    @routes.get("/log")
    def log(pipeline: PipelinePath) -> LogStatus:
        """Bytes before and after compaction, segments, runs, horizon, floor, oldest change, consumers."""
        desk.check(pipeline)
        told: LogStatus = _retained().log_status(desk.definition.log.root, _opened(desk), datetime.now(UTC))
        return told

    @routes.get("/log/segments")
    def segments(pipeline: PipelinePath) -> list[SegmentLine]:
        """Every segment of single changes, oldest first (`cdc log ls`)."""
        desk.check(pipeline)
        lines: list[SegmentLine] = _retained().segment_lines(_opened(desk))
        return lines

    @routes.get("/log/segments/{segment}/files")
    def files_of_segment(pipeline: PipelinePath, segment: SegmentPath) -> list[FileLine]:
        """The data files of a segment, in order of position (`cdc log ls --files`)."""
        desk.check(pipeline)
        lines: list[FileLine] = _retained().files_of_segment(_opened(desk), segment)
        return lines

    @routes.get("/log/runs/{run}/files")
    def files_of_run(pipeline: PipelinePath, run: RunPath) -> list[FileLine]:
        """The data files of a run of the compacted log (`cdc log ls --files`)."""
        desk.check(pipeline)
        lines: list[FileLine] = _retained().files_of_run(desk.definition.log.root, _opened(desk), run)
        return lines


def _add_inspect(routes: APIRouter, desk: CopyRoutes) -> None:
    @routes.get("/log/inspect")
    def inspect(pipeline: PipelinePath, position: PositionQuery, most: RowsQuery = 1_000) -> Transaction:
        """The rows of one transaction without their values (`cdc log inspect POSITION`); 404 if there is none."""
        desk.check(pipeline)
        found: Transaction = import_module("cdc.service.transaction_view").transaction(_opened(desk), position, most)
        return found


def _add_compact(routes: APIRouter, desk: CopyRoutes) -> None:
    @routes.post("/log/compact", status_code=ACCEPTED)
    def compact(pipeline: PipelinePath, asked: CompactBody, request: Request) -> CompactionJob:
        """Have the apply process compact the log now (`cdc log compact`); 409 while none runs."""
        desk.check(pipeline)
        number = ask_compact(desk.catalog, pipeline, everything=asked.everything)
        if number is None:
            raise StateConflict("no apply process runs that could compact", remedy="start it, or run 'cdc log compact'")
        desk.catalog.audit.write(actor_of(request), "log.compact", pipeline, {"everything": asked.everything})
        return _compaction(desk, pipeline, number)

    @routes.get("/log/compact/{job}")
    def compaction(pipeline: PipelinePath, job: JobPath) -> CompactionJob:
        """What became of a compaction that was asked for."""
        desk.check(pipeline)
        return _compaction(desk, pipeline, job)


def _add_gc(routes: APIRouter, desk: CopyRoutes) -> None:
    @routes.post("/log/gc")
    def gc(pipeline: PipelinePath, asked: GcBody, request: Request) -> Collected:
        """Remove files whose grace is over, and have the reader let go of segments (`cdc log gc`)."""
        desk.check(pipeline)
        collected: Collected = import_module("cdc.service.log_vacuum").collect(desk.definition, dry_run=asked.dry_run)
        if not asked.dry_run:
            desk.catalog.audit.write(actor_of(request), "log.gc", pipeline, asdict(collected))
        return collected


def _add_verify(routes: APIRouter, desk: CopyRoutes) -> None:
    @routes.get("/log/verify")
    def verify(pipeline: PipelinePath, most: MostQuery = MOST // 4) -> LogCheck:
        """Whether commits, files and the newest rows are as they were written (`cdc log verify` reads all of them)."""
        desk.check(pipeline)
        return log_check(desk.definition, most)


def _compaction(desk: CopyRoutes, pipeline: str, number: int) -> CompactionJob:
    found = desk.catalog.commands.get(number)
    if found is None or found.kind != COMPACT or found.pipeline != pipeline:
        raise UnknownName(f"no compaction has the number {number}", remedy="POST to /log/compact asks for one")
    said = found.result or {}
    return CompactionJob(number, found.state.value, said.get("summary"), said.get("error"))


def _opened(desk: CopyRoutes) -> Any:
    return _retained().opened(desk.definition.log.root)


def _retained() -> Any:
    # loaded when somebody first asks, as in copies
    return import_module("cdc.service.log_status_reader")
