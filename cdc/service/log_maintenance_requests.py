"""Maintenance of the log on request: compaction, vacuum, and a check of its newest files.

Commands and API call this module. While an apply process runs, only that process compacts the log. Only the reader
trims segments. This module therefore sends requests to apply and reader.
"""

from __future__ import annotations

from datetime import UTC, datetime
from threading import Event
from typing import TYPE_CHECKING, Final

from cdc.capture.settings import retention_of
from cdc.catalog.commands import COMPACT, CommandState
from cdc.config import Definition
from cdc.log.audit.verify import AuditScope, verify
from cdc.log.trim_plan import plan_trim, request_trim
from cdc.log.vacuum import remove_orphan_files, vacuum, waiting
from cdc.service.log_status_records import FindingLine, LogCheck, Trimmable, VacuumReport
from cdc.service.status import pipeline_status

if TYPE_CHECKING:
    from cdc.catalog import Catalog
    from cdc.catalog.commands import Command

MAX_FINDINGS: Final = 1_000
"""Maximum number of findings that the result of one check lists."""
_POLL_INTERVAL: Final = 0.2


def request_compaction(catalog: Catalog, pipeline: str, *, everything: bool) -> int | None:
    """Ask the running apply process to compact the log, and return the id of the command in the catalog.

    Return None if no apply process is running; then the caller may compact the log itself.
    """
    if not _is_apply_running(catalog, pipeline):
        return None
    return catalog.commands.post(pipeline, COMPACT, {"everything": everything})


def wait_for_compaction(catalog: Catalog, pipeline: str, command: int) -> Command | None:
    """Wait until the apply process has finished a compaction command, and return the command.

    If the apply process ends earlier, mark the command as abandoned and return None.
    """
    never = Event()
    while True:
        found = catalog.commands.get(command)
        if found is None or found.state is not CommandState.PENDING:
            return found
        if not _is_apply_running(catalog, pipeline):
            catalog.commands.finish(command, {"reason": "abandoned"}, ok=False)
            return None
        never.wait(_POLL_INTERVAL)


def vacuum_log(definition: Definition, *, dry_run: bool) -> VacuumReport:
    """Delete orphan files, delete removed files after their grace period, and ask the reader to trim segments.

    A dry run changes nothing. The report then counts the files that would be deleted.
    """
    root, retention = definition.log.root, retention_of(definition)
    trim = plan_trim(root, retention)
    removed = vacuum(root, retention, dry_run=dry_run)
    orphans = remove_orphan_files(root, retention.grace, dry_run=dry_run)
    if trim is not None and not dry_run:
        request_trim(root)
    return VacuumReport(
        dry_run=dry_run,
        trim=None if trim is None else Trimmable(segments=trim.segments, oldest=str(trim.upto)),
        files=removed.files + orphans.files,
        bytes=removed.size + orphans.size,
        leaving_bytes=waiting(root),
    )


def check_log(definition: Definition, most: int) -> LogCheck:
    """Check all commits, the presence and size of all files, and the rows of the newest files.

    `most` limits the bytes of the files whose rows are read. Raises LogError if there is no log.
    """
    report = verify(definition.log.root, AuditScope(most=most, grace=definition.log.retain.grace))
    fields = report.to_json()
    return LogCheck(
        **{
            **fields,
            "sound": report.is_sound,
            "complete": report.read == report.files,
            "summary": report.summary,
            "findings": [FindingLine(**finding) for finding in fields["findings"][:MAX_FINDINGS]],
        }
    )


def _is_apply_running(catalog: Catalog, pipeline: str) -> bool:
    processes = pipeline_status(catalog, pipeline, datetime.now(UTC)).processes
    return any(found.process == "apply" and found.state in {"starting", "running"} for found in processes)
