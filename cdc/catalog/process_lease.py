"""Process leases: a process has the right to do something alone, until it ends.

A lease is a row in the catalog that a thread renews. If a process on this machine is dead, its lease is void at once.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Final

from cdc.catalog import Catalog
from cdc.errors import CdcError, SinkInUse

LEASE: Final = 15.0
"""Seconds for which a lease is valid; a running process renews its lease three times in this period."""


def holder() -> str:
    """Return a unique name for this process as the owner of a lease: host, process id and a random suffix."""
    return f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"


def is_dead(name: str) -> bool:
    """Return whether a lease owner ran on this machine and has ended; name: as `holder` returned it."""
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


@contextmanager
def sole_replay(catalog: Catalog, pipeline: str, sink: str) -> Iterator[None]:
    """Acquire the replay lease of the sink for the block; raise SinkInUse if another process has this lease.

    Replays need it, and `cdc indexes drop`, which must not delete what a replay builds.
    """
    with leased(catalog, _replay_lease(pipeline, sink), f"a replay of sink {sink!r} or 'cdc indexes drop' is running"):
        yield


def is_replay_running(catalog: Catalog, pipeline: str, sink: str) -> bool:
    """Return whether a process has the replay lease of the sink."""
    found = catalog.leases.holder(_replay_lease(pipeline, sink))
    return found is not None and not is_dead(found)


@contextmanager
def leased(catalog: Catalog, name: str, conflict: str) -> Iterator[None]:
    """Acquire a lease for the block; raise SinkInUse with the message `conflict` if another process has the lease."""
    own_name, done = holder(), Event()
    before = catalog.leases.holder(name)
    if before is not None and is_dead(before):
        catalog.leases.release(name, before)
    if not catalog.leases.acquire(name, own_name, LEASE):
        raise SinkInUse(
            conflict,
            remedy="wait until the other process ends, or up to 15 s if it was killed; then run the command again",
        )
    renewing = Thread(target=_renew, args=(catalog, name, own_name, done), daemon=True)
    renewing.start()
    try:
        yield
    finally:
        done.set()
        renewing.join()
        catalog.leases.release(name, own_name)


def _replay_lease(pipeline: str, sink: str) -> str:
    return f"replay {pipeline}/{sink}"


def _renew(catalog: Catalog, name: str, own_name: str, done: Event) -> None:
    while not done.wait(LEASE / 3):
        try:
            catalog.leases.acquire(name, own_name, LEASE)
        except CdcError:
            continue  # an outage longer than the lease lets the apply process in; the record fences its publish
