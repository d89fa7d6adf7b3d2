"""Holds: of two apply processes that fill one sink, the second waits until the first has let go or died.

A lease in the catalog, renewed by a thread of its own; of a process of this machine that is gone it counts for nothing
at once. It is a courtesy: one that was stopped for longer than its lease and wakes is fenced by the published record.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Final

import structlog

from cdc.catalog import Catalog
from cdc.errors import CdcError

LEASE: Final = 15.0
"""Seconds until a dead process' hold runs out; renewed three times in that."""
ASK_EVERY: Final = 1.0
"""Seconds between two attempts at a sink that somebody else holds."""

log = structlog.get_logger("apply")


class SinkLeases:
    """The sinks that one process may fill; a catalog that is away keeps nobody out."""

    def __init__(self, catalog: Catalog, pipeline: str) -> None:
        self._catalog, self._pipeline = catalog, pipeline
        self.holder = holder()
        self._mine: set[str] = set()
        self._asked: dict[str, float] = {}
        self._others: dict[str, str] = {}
        self._turn = Lock()
        """Each sink asks in a thread of its own."""
        self._done = Event()
        self._renewing = Thread(target=self._renew, name="holds", daemon=True)

    def take(self, sink: str) -> bool:
        """Whether the sink is this process' own; asked at every look, and cheap once it is."""
        if sink in self._mine:
            return True
        with self._turn:
            return self._take(sink)

    def _take(self, sink: str) -> bool:
        if time.monotonic() - self._asked.get(sink, -ASK_EVERY) < ASK_EVERY:
            return sink not in self._others
        self._asked[sink] = time.monotonic()
        try:
            return self._acquire(sink)
        except CdcError as exc:
            log.warning("catalog is unreachable", code=exc.code)
            self._others.pop(sink, None)
            return True

    def other(self, sink: str) -> str:
        """Who holds a sink that could not be taken: machine, process id and a mark."""
        return self._others.get(sink, "")

    def close(self) -> None:
        """Let go of all of them."""
        self._done.set()
        if self._renewing.is_alive():
            self._renewing.join()
        with suppress(CdcError):  # then they run out
            while self._mine:
                self._catalog.leases.release(self._name(self._mine.pop()), self.holder)

    def _acquire(self, sink: str) -> bool:
        name, leases = self._name(sink), self._catalog.leases
        before = leases.holder(name)
        if before is not None and before != self.holder and is_dead(before):
            leases.release(name, before)
        if leases.acquire(name, self.holder, LEASE):
            self._others.pop(sink, None)
            self._mine.add(sink)
            if not self._renewing.is_alive() and not self._done.is_set():
                self._renewing.start()
            return True
        other = leases.holder(name) or ""
        if self._others.get(sink) != other:
            self._others[sink] = other
            log.warning("another apply process holds the sink: waiting for it to end", sink=sink, holder=other)
        return False

    def _renew(self) -> None:
        while not self._done.wait(LEASE / 3):
            for sink in list(self._mine):
                try:
                    if not self._catalog.leases.acquire(self._name(sink), self.holder, LEASE):
                        self._mine.discard(sink)
                except CdcError:
                    continue  # a catalog that is away for longer lets another in, and the publish of one is fenced

    def _name(self, sink: str) -> str:
        return f"apply {self._pipeline}/{sink}"


def holder() -> str:
    """A name for this process as a holder of leases: where it runs, its id, and a mark of its own."""
    return f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"


def is_dead(name: str) -> bool:
    """Whether the holder was a process of this machine that is gone."""
    host, pid, _ = name.split(" ")
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
