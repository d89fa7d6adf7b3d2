"""Upkeep of the log as people ask for it: the process that owns a step does it, and is asked here."""

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
    """Ask the running apply process; the command's number, or None if none runs: then anybody may compact."""
    if not _is_apply_running(catalog, pipeline):
        return None
    return catalog.commands.post(pipeline, COMPACT, {"everything": everything})


def wait_for_compaction(catalog: Catalog, pipeline: str, command: int) -> Command | None:
    """The command once it is finished, however long that takes; None, and taken back, if the process went away."""
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
