"""Vacuum on request: removes files past their grace, and asks the reader to drop compacted segments."""

from __future__ import annotations

from cdc.capture.settings import retention_of
from cdc.config import Definition
from cdc.log import retention_worker
from cdc.log.audit.orphan_files import remove_orphan_files
from cdc.log.vacuum import vacuum, waiting
from cdc.service.log_status import Trimmable, VacuumReport


def vacuum_log(definition: Definition, *, dry_run: bool) -> VacuumReport:
    """Delete removed files whose grace is over and orphan files, and ask the reader to drop segments.

    A dry run changes nothing.
    """
    root, retention = definition.log.root, retention_of(definition)
    trim = retention_worker.plan_trim(root, retention)
    swept = vacuum(root, retention, dry_run=dry_run)
    strays = remove_orphan_files(root, retention.grace, dry_run=dry_run)
    if trim is not None and not dry_run:
        retention_worker.request_trim(root)
    return VacuumReport(
        dry_run=dry_run,
        trim=None if trim is None else Trimmable(segments=trim.segments, oldest=str(trim.upto)),
        files=swept.files + strays.files,
        bytes=swept.size + strays.size,
        leaving_bytes=waiting(root),
    )
