"""Leases on sinks: if two apply processes name the same sink, one of them waits until the other releases it or dies.

A lease is a row in the catalog that a thread renews. If a process on this machine is dead, its lease is void at once.
Correctness does not depend on leases. A process may be suspended for longer than its lease and then resume: its next
publish fails, because the published record of the sink fences it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Final

import structlog

from cdc.catalog import Catalog
from cdc.catalog.process_lease import LEASE, holder, is_dead
from cdc.errors import CdcError

ASK_EVERY: Final = 1.0
"""Seconds between two attempts to acquire the lease of a sink that another process has."""

log = structlog.get_logger("apply")


class SinkLeases:
    """The leases of one apply process on its sinks. While the catalog is unreachable, the process needs no lease."""

    def __init__(self, catalog: Catalog, pipeline: str) -> None:
        self._catalog, self._pipeline = catalog, pipeline
        self.holder = holder()
        self._acquired: set[str] = set()
        self._asked_at: dict[str, float] = {}
        self._other_holders: dict[str, str] = {}
        self._lock = Lock()
        """Protects the state, because each sink asks for its lease from a separate thread."""
        self._closed = Event()
        self._renewer = Thread(target=self._renew, name="sink-leases", daemon=True)

    def try_acquire(self, sink: str) -> bool:
        """Acquire the lease of the sink if it is free; return whether this process has it.

        The call is cheap if this process already has the lease.
        """
        if sink in self._acquired:
            return True
        with self._lock:
            return self._try_acquire(sink)

    def _try_acquire(self, sink: str) -> bool:
        if time.monotonic() - self._asked_at.get(sink, -ASK_EVERY) < ASK_EVERY:
            return sink not in self._other_holders
        self._asked_at[sink] = time.monotonic()
        try:
            return self._acquire(sink)
        except CdcError as exc:
            log.warning(
                "cannot check the lease of a sink in the catalog; the sink continues without a lease",
                sink=sink,
                code=exc.code,
                message=exc.message,
            )
            self._other_holders.pop(sink, None)
            return True

    def other_holder(self, sink: str) -> str:
        """Return the other process that has the lease of a sink, as host, process id and a random suffix.

        The text is empty if this process has seen no other process with the lease.
        """
        return self._other_holders.get(sink, "")

    def close(self) -> None:
        """Release all leases."""
        self._closed.set()
        if self._renewer.is_alive():
            self._renewer.join()
        with suppress(CdcError):  # then they expire
            while self._acquired:
                self._catalog.leases.release(self._name(self._acquired.pop()), self.holder)

    def _acquire(self, sink: str) -> bool:
        name, leases = self._name(sink), self._catalog.leases
        before = leases.holder(name)
        if before is not None and before != self.holder and is_dead(before):
            leases.release(name, before)
        if leases.acquire(name, self.holder, LEASE):
            self._other_holders.pop(sink, None)
            self._acquired.add(sink)
            if not self._renewer.is_alive() and not self._closed.is_set():
                self._renewer.start()
            return True
        other = leases.holder(name) or ""
        if self._other_holders.get(sink) != other:
            self._other_holders[sink] = other
            log.warning(
                "another apply process has the lease of the sink: waiting until that process ends",
                sink=sink,
                holder=other,
            )
        return False

    def _renew(self) -> None:
        while not self._closed.wait(LEASE / 3):
            for sink in list(self._acquired):
                try:
                    if not self._catalog.leases.acquire(self._name(sink), self.holder, LEASE):
                        self._acquired.discard(sink)
                except CdcError:
                    continue  # an outage longer than the lease lets a second process in; the record fences one of them

    def _name(self, sink: str) -> str:
        return f"apply {self._pipeline}/{sink}"
