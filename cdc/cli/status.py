"""`cdc status`: print the state of a pipeline, its processes, sinks and tables, with a remedy under each problem."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import LineMark, echo, emit, line
from cdc.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path

    from cdc.catalog import Catalog
    from cdc.config import Definition
    from cdc.service.log_status_records import LogStatus
    from cdc.service.slot_risk import SourceObservation
    from cdc.service.status import PipelineStatus

WATCH_EVERY = 1.0
"""Seconds between two prints of `cdc status --watch`."""
LOG_ANSWERS = 15.0
"""Maximum seconds to wait for the log's storage; after that the status reports the log as unreadable."""
SOURCE_ANSWERS = 5.0
"""Maximum seconds to wait for the source; after that the status reports that the source does not answer."""
CATALOG_CREATED = 5.0
"""Maximum seconds to wait for a catalog, which the reader creates at the very first start after its imports."""
_CLEAR = "\x1b[H\x1b[2J"


def register(app: typer.Typer) -> None:
    """Add the command `status` to the app."""
    app.command()(status)


def status(
    config: ConfigOption = DEFAULT_CONFIG,
    watch: Annotated[bool, typer.Option("--watch", help="Print the status again every second until ^C.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Also exit with status 4 when the pipeline is degraded.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show the state of the pipeline and its problems.

    The command prints processes, lags, sinks and tables, and a remedy under each problem. It exits with status 4 if the
    reader or the apply process failed, has stopped, or does not report.
    """
    import sys

    from cdc.catalog import Catalog
    from cdc.config import load_definition
    from cdc.service.log_sampler import LogSampler
    from cdc.service.source_sampler import SourceSampler
    from cdc.service.status import DOWN, RUNNING

    definition = load_definition(config)
    log, source = LogSampler(definition.log.root, str(config)), SourceSampler(definition)
    with Catalog.open(definition.catalog.url, migrate=False, created_within=CATALOG_CREATED) as catalog:
        source.refresh()  # the source answers this query while the log is read
        seen = log.wait(LOG_ANSWERS), source.wait_for_rate(SOURCE_ANSWERS)
        found = _print_status(catalog, definition, seen, file=config, json=json)
        while watch:
            time.sleep(WATCH_EVERY)
            if not json and sys.stdout.isatty():
                sys.stdout.write(_CLEAR)
            found = _print_status(catalog, definition, (log.refresh(), source.refresh()), file=config, json=json)
    if found.state == DOWN or (exit_code and found.state != RUNNING):
        raise typer.Exit(ExitCode.FINDING.value)


def _print_status(
    catalog: Catalog,
    definition: Definition,
    seen: tuple[LogStatus | None, SourceObservation | None],
    *,
    file: Path,
    json: bool,
) -> PipelineStatus:
    from datetime import UTC, datetime

    from cdc.service.defined_pipeline import DefinedPipeline
    from cdc.service.status import RUNNING, pipeline_status, with_source

    log, source = seen
    defined = DefinedPipeline.of(definition, str(file))
    reported = pipeline_status(catalog, definition.name, datetime.now(UTC), log, defined=defined)
    found = with_source(reported, source, definition.source.heartbeat or 0.0, file=str(file))
    summary = f"{definition.name} is {found.state}"
    if json:
        emit("status", json=True, summary=summary, result=found.to_json(), ok=found.state == RUNNING)
    else:
        _print_lines(found, summary, file)
    return found


def _print_lines(found: PipelineStatus, summary: str, file: Path) -> None:
    from cdc.cli.log_storage import retention_line
    from cdc.service.status import RUNNING
    from cdc.snapshot.backfill_status import progress_text, tables_text

    line(LineMark.GOOD if found.state == RUNNING else LineMark.BAD, summary)
    for problem in found.problems:
        code = f"{problem.code} " if problem.code else ""
        line(LineMark.BAD, f"{code}{problem.subject}: {problem.message}", fix=problem.remedy)
    for process in found.processes:
        age = "" if process.age_seconds is None else f"  pid {process.pid}  reported {process.age_seconds:.1f} s ago"
        spark = "" if process.has_spark is None else "  with Spark" if process.has_spark else "  without Spark so far"
        echo(f"  {process.process:<10}{process.state:<14}{age}{spark}")
    observed = found.source.observed
    if observed is not None and not observed.up:
        echo(f"  {'source':<10}does not answer, so the WAL that it retains is unknown: {observed.error}")
    elif found.source.slot_forecast is not None:
        echo(f"  {'slot':<10}{found.source.slot_forecast}")
    echo(f"  {'log':<10}{found.source.position or '–':<14}  lag {_seconds(found.source.lag_seconds)}")
    if found.log is not None:
        echo(f"  {'kept':<10}{retention_line(found.log)}")
    for sink in found.sinks:
        engine = {None: "", "here": "", "spark": ", last batch in Spark"}[sink.engine]
        slowed = f"  {sink.reason}" if sink.reason and sink.state != "failed" else ""
        lag = _seconds(sink.lag_seconds)
        echo(f"  {sink.name:<9} {sink.position or '–':<14}  lag {lag}  {sink.state}{engine}{slowed}")
    _print_tables(found, file)
    _print_verification(found)
    for backfill in found.backfills:
        if backfill.pending:
            what = tables_text(backfill.request)
            echo(
                f"  {backfill.kind:<9} {backfill.id:>4}  {backfill.state:<14}{what}  {progress_text(backfill)}".rstrip()
            )
    if found.executor_copy is not None:
        echo(f"  {'copy':<9} {found.executor_copy.text}")


def _print_verification(found: PipelineStatus) -> None:
    if found.verification is not None:
        echo(f"  {'verify':<9} {found.verification.state:<14}  {found.verification.detail}".rstrip())
    for verified in found.verified:
        through = verified.verified_through or f"not all rows yet, {verified.ranges} ranges"
        apart = f"  {verified.mismatched:,} rows differed" if verified.mismatched else ""
        echo(f"    {verified.topic:<31} {verified.sink:<9} verified through {through}{apart}")


def _print_tables(found: PipelineStatus, file: Path) -> None:
    from cdc.errors import complete_remedy
    from cdc.service.status import FAILED_STATES
    from cdc.snapshot.backfill_status import progress_text

    for table in found.tables:
        where, counted = (table.sink, "merged") if table.sink else ("source", "copied")
        echo(f"    {table.topic:<31} {where:<9} {table.state:<14}{table.rows:>12,} {counted}")
        if table.progress is not None and (words := progress_text(table.progress)):
            echo(f"      {words}")
        # for example parked keys or foreign writes; the reason of a failed table is among the problems
        if table.reason and table.state not in FAILED_STATES:
            echo(f"      {complete_remedy(table.reason, file=str(file))}")


def _seconds(lag: float | None) -> str:
    return "–" if lag is None else f"{lag:.2f} s"
