"""Requests to compact the log now; a running apply process does the work."""

from __future__ import annotations

from datetime import UTC, datetime
from threading import Event
from typing import TYPE_CHECKING, Final

from cdc.catalog.commands import COMPACT, CommandState
from cdc.service.status import pipeline_status

if TYPE_CHECKING:
    from cdc.catalog import Catalog
    from cdc.catalog.commands import Command

_ASK_EVERY: Final = 0.2


def request_compaction(catalog: Catalog, pipeline: str, *, everything: bool) -> int | None:
    """Post the command for the running apply process; None if none runs, and the caller may compact."""
    if not _is_apply_running(catalog, pipeline):
        return None
    return catalog.commands.post(pipeline, COMPACT, {"everything": everything})


def wait_for_compaction(catalog: Catalog, pipeline: str, command: int) -> Command | None:
    """Wait until the command is finished; None, with the command withdrawn, if the apply process ended."""
    never = Event()
    while True:
        found = catalog.commands.get(command)
        if found is None or found.state is not CommandState.PENDING:
            return found
        if not _is_apply_running(catalog, pipeline):
            catalog.commands.finish(command, {"reason": "abandoned"}, ok=False)
            return None
        never.wait(_ASK_EVERY)


def _is_apply_running(catalog: Catalog, pipeline: str) -> bool:
    processes = pipeline_status(catalog, pipeline, datetime.now(UTC)).processes
    return any(found.process == "apply" and found.state in {"starting", "running"} for found in processes)
