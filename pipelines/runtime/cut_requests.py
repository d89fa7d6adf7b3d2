"""Requests for cuts: a sink ends a batch at a given position and keeps this cut readable.

Verification posts the requests in the catalog, and the apply process answers them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import structlog

from cdc.catalog import Catalog, Command
from cdc.errors import CdcError
from cdc.stores.published_record import Published

CUT: Final = "cut"
RELEASE: Final = "release"
EVERY: Final = 0.2
"""Seconds between two times that a running sink reads the requests; each batch asks for them several times."""

log = structlog.get_logger("apply")


@dataclass(frozen=True, slots=True)
class PendingCut:
    """An unanswered request to the apply process: one sink must end a batch at a position and keep this cut."""

    command: int
    """Number of the command in the catalog."""
    sink: str
    position: int


class CutRequests:
    """The open requests for cuts of one pipeline; while the catalog is unreachable, no request is found.

    Several threads may share the object.
    """

    def __init__(self, catalog: Catalog, pipeline: str, every: float = 0.0) -> None:
        """every: seconds for which requests are kept that were read from the catalog; see EVERY."""
        self._catalog, self._pipeline, self._every = catalog, pipeline, every
        self._lock = Lock()
        self._requests: list[Command] = []
        self._read_at = -math.inf

    def between(self, sink: str, after: int, before: int) -> list[PendingCut]:
        """Return the open requests to a sink for positions above `after` and below `before`, in ascending order."""
        return sorted((c for c in self._open(sink) if after < c.position < before), key=lambda c: c.position)

    def due(self, sink: str, position: int) -> list[PendingCut]:
        """Return the open requests to a sink for positions up to and including `position`."""
        return [c for c in self._open(sink) if c.position <= position]

    def has_requests(self, sink: str) -> bool:
        """Return whether a sink has an open request for a cut at any position."""
        return bool(self._open(sink))

    def answer(self, cut: PendingCut, record: Published, handle: str) -> None:
        """Answer a request: send the published record of the kept cut, and the handle that identifies the cut."""
        self._finish(cut, {"record": json.loads(record.to_json()), "handle": handle})

    def refuse(self, cut: PendingCut, reason: str) -> None:
        """Answer that the sink cannot end a batch at the requested position; reason: why this is impossible."""
        self._finish(cut, {"reason": reason}, ok=False)

    def pop_releases(self, sink: str) -> list[str]:
        """Return the handles of kept cuts that the sink may release now; each handle is returned once."""
        try:
            commands = self._catalog.commands.pending(self._pipeline, RELEASE)
        except CdcError:
            return []
        releases = [c for c in commands if c.payload["sink"] == sink]
        for command in releases:
            self._catalog.commands.finish(command.id, {})
        return [c.payload["handle"] for c in releases]

    def _finish(self, cut: PendingCut, result: Mapping[str, Any], *, ok: bool = True) -> None:
        self._catalog.commands.finish(cut.command, result, ok=ok)
        with self._lock:
            self._requests = [command for command in self._requests if command.id != cut.command]

    def _read(self) -> list[Command]:
        with self._lock:
            if time.monotonic() - self._read_at >= self._every:
                self._requests = self._catalog.commands.pending(self._pipeline, CUT)
                self._read_at = time.monotonic()
            return self._requests

    def _open(self, sink: str) -> list[PendingCut]:
        try:
            commands = self._read()
        except CdcError as exc:
            log.warning(
                "cannot read requests for cuts from the catalog; the sink continues, and 'cdc verify' waits",
                sink=sink,
                code=exc.code,
                message=exc.message,
            )
            return []
        return [PendingCut(c.id, sink, int(c.payload["position"])) for c in commands if c.payload["sink"] == sink]
