"""Requests for cuts: a sink ends a batch at a given position and keeps this cut readable.

Verification posts the requests in the catalog, and the apply process answers them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import structlog

from cdc.catalog import Catalog
from cdc.errors import CdcError
from cdc.targets.published_record import Published

CUT: Final = "cut"
RELEASE: Final = "release"

log = structlog.get_logger("apply")


@dataclass(frozen=True, slots=True)
class PendingCut:
    """An unanswered request to the apply process: one sink must end a batch at a position and keep this cut."""

    command: int
    """Number of the command in the catalog."""
    sink: str
    position: int


class CutRequests:
    """The open requests for cuts of one pipeline; while the catalog is unreachable, no request is found."""

    def __init__(self, catalog: Catalog, pipeline: str) -> None:
        self._catalog, self._pipeline = catalog, pipeline

    def open(self, sink: str) -> list[PendingCut]:
        """Return the open requests to a sink.

        Verification posts a request before it writes a heartbeat to the source. So a sink finds the request in time if
        it reads the requests at the beginning of each batch.
        """
        try:
            commands = self._catalog.commands.pending(self._pipeline, CUT)
        except CdcError as exc:
            log.warning(
                "cannot read requests for cuts from the catalog; the sink continues, and 'cdc verify' waits",
                sink=sink,
                code=exc.code,
                message=exc.message,
            )
            return []
        return [PendingCut(c.id, sink, int(c.payload["position"])) for c in commands if c.payload["sink"] == sink]

    def answer(self, cut: PendingCut, record: Published, handle: str) -> bool:
        """Answer a request: send the published record of the kept cut, and the handle that identifies the cut.

        Returns False if nobody waits for the answer any more. The handle is then never released by a request.
        """
        return self._catalog.commands.finish(cut.command, {"record": json.loads(record.to_json()), "handle": handle})

    def refuse(self, cut: PendingCut, reason: str) -> None:
        """Answer that the sink cannot end a batch at the requested position; reason: why this is impossible."""
        self._catalog.commands.finish(cut.command, {"reason": reason}, ok=False)

    def pop_releases(self, sink: str) -> list[str]:
        """Return the handles of kept cuts that the sink may release now; each handle is returned once."""
        try:
            commands = self._catalog.commands.pending(self._pipeline, RELEASE)
        except CdcError:
            return []
        releases = [c for c in commands if c.payload["sink"] == sink]
        if releases:
            self._catalog.commands.delete(command.id for command in releases)
        return [c.payload["handle"] for c in releases]
