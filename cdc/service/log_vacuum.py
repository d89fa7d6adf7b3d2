"""Collecting: letting go of what is compacted and read by everybody, when a person asks for it."""

from __future__ import annotations

from cdc.capture.settings import retention_of
from cdc.config import Definition
from cdc.log import retention_worker
from cdc.log.audit.orphan_files import remove_orphan_files
from cdc.log.vacuum import vacuum, waiting
from cdc.service.log_status import Trimmable, VacuumReport


def vacuum_log(definition: Definition, *, dry_run: bool) -> VacuumReport:
    """Remove files whose grace is over and files of nobody, and ask the reader to take out the segments that may go.

    In a dry run nothing is touched.
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
