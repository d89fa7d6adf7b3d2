"""Cuts: positions at which somebody asked a sink to end a batch, through the catalog's commands."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import structlog

from cdc.catalog import Catalog
from cdc.errors import CdcError
from cdc.stores.published import Published

CUT: Final = "cut"
RELEASE: Final = "release"

log = structlog.get_logger("apply")


@dataclass(frozen=True, slots=True)
class PendingCut:
    """One request."""

    command: int
    sink: str
    position: int


class CutRequests:
    """The open requests of one pipeline, read anew at each batch; a catalog that is away asks for nothing."""

    def __init__(self, catalog: Catalog, pipeline: str) -> None:
        self._catalog, self._pipeline = catalog, pipeline

    def between(self, sink: str, after: int, before: int) -> list[PendingCut]:
        """Requests strictly inside (after, before), in order."""
        return sorted((c for c in self._open(sink) if after < c.position < before), key=lambda c: c.position)

    def due(self, sink: str, position: int) -> list[PendingCut]:
        """Requests at or below position."""
        return [c for c in self._open(sink) if c.position <= position]

    def asked(self, sink: str) -> bool:
        """Whether somebody waits for a cut, wherever it is."""
        return bool(self._open(sink))

    def answer(self, cut: PendingCut, record: Published, handle: str) -> None:
        """The sink stands exactly there, and this is how to read it."""
        self._catalog.commands.finish(cut.command, {"record": json.loads(record.to_json()), "handle": handle})

    def refuse(self, cut: PendingCut, reason: str) -> None:
        """The sink cannot end there."""
        self._catalog.commands.finish(cut.command, {"reason": reason}, ok=False)

    def released(self, sink: str) -> list[str]:
        """Handles that nobody needs any more; each is returned once."""
        try:
            commands = self._catalog.commands.pending(self._pipeline, RELEASE)
        except CdcError:
            return []
        mine = [c for c in commands if c.payload["sink"] == sink]
        for command in mine:
            self._catalog.commands.finish(command.id, {})
        return [c.payload["handle"] for c in mine]

    def _open(self, sink: str) -> list[PendingCut]:
        try:
            commands = self._catalog.commands.pending(self._pipeline, CUT)
        except CdcError as exc:
            log.warning("catalog is unreachable", code=exc.code)
            return []
        return [PendingCut(c.id, sink, int(c.payload["position"])) for c in commands if c.payload["sink"] == sink]
