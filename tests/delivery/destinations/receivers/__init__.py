"""Every kind of destination as the tests of the contract use it: makes destinations, and reads what a consumer gets.

To add one, write a module here with

- `receiver(request)`: a context manager that gives a Receiver with a place of its own in a server that tests share;
- `killable(request)`: the same with a server that the test may kill; leave it out if there is no server;
- `CRASH_POINTS`: names of failpoints in the destination, where the tests kill the process: at the second call, or at
  call n for `NAME:n`.

The names of the modules are the parameters of the tests.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Final, NamedTuple, Protocol

import pytest

from cdc.delivery.destinations.contract import Destination
from cdc.delivery.formats.contract import Headers
from tests.fixtures.skips import NO_PROMISE

NAMES: Final = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


class Received(NamedTuple):
    """One message as a consumer gets it."""

    id: str
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


class Server(Protocol):
    """The server of a destination, which a test may kill."""

    def kill(self) -> None:
        """End it by SIGKILL."""

    def start(self) -> None:
        """Start it again, with the same address and what it has stored."""


@dataclass(frozen=True)
class Receiver:
    """One kind of destination at one place of its own."""

    make: Callable[[], Destination]
    """Returns a new destination, always of the same delivery; can be pickled."""
    received: Callable[[], list[Received]]
    """What a consumer that began before the first event has got by now, the events of a topic and key in order."""
    topics: tuple[str, str]
    """Two topics to send to; the second has as odd a name as the destination takes."""
    headers: Headers = (
        ("plain", b"text"),
        ("Größe / x-ü", "Ünïcode ✓".encode()),
        ("empty", b""),
        ("bytes", b"\x00\xff"),
    )
    """Headers that the destination keeps as they are."""
    too_large: int | None = None
    """Bytes of a value that the destination refuses."""
    largest: int = 1 << 20
    """Bytes of a value that it accepts."""
    many: int = 800
    """Events, a multiple of 40, that the server takes in less than a second."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Name of a property → why the destination does not have it."""
    server: Server | None = None
    """Only in a killable receiver."""
    forget_progress: Callable[[], object] | None = None
    """Removes the progress that the destination stores; None if it stores none."""

    def require(self, wanted: str) -> None:
        """Skip the test if the destination does not have the property."""
        if wanted in self.missing:
            pytest.skip(f"{NO_PROMISE}: {self.missing[wanted]}")


def module_of(name: str) -> ModuleType:
    """The module of a kind of destination."""
    return import_module(f"{__name__}.{name}")


def crash_points() -> list[tuple[str, str]]:
    """Kind of destination and name of a failpoint: those of the sending process and those of the destination."""
    sending = ("batch_half_sent", "batch_sent", "batch_committed")
    return [(name, point) for name in NAMES for point in (*sending, *module_of(name).CRASH_POINTS)]


def killable() -> list[str]:
    """Kinds of destinations that have a server."""
    return [name for name in NAMES if hasattr(module_of(name), "killable")]
