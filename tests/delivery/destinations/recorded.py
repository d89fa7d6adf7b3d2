"""A destination whose events are in a file before they are sent, as the log has them, and the history from this file.

Also the examples for receivers, which are not in a package.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from cdc.delivery.destinations.contract import Destination, Event, HistoryPage, Promise
from tests.source_tree import ROOT


class RecordedHistory:
    """The events of a file, each once."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def page(self, after: str, most: int) -> HistoryPage:
        events = self.events()
        names = [event.id for event in events]
        first = names.index(after) + 1 if after else 0
        found = events[first : first + most]
        return HistoryPage(found, found[-1].id if found else after, first + most >= len(events))

    def events(self) -> list[Event]:
        """All events, in the order of their places."""
        found: dict[str, Event] = {}
        if self._file.exists():
            with self._file.open("rb") as content:
                while content.peek(1):
                    found |= {event.id: event for event in pickle.load(content)}
        return sorted(found.values(), key=lambda event: (event.position, event.ordinal))


class RecordedDestination:
    """Passes everything on to another destination."""

    promise: ClassVar[Promise] = Promise.AT_MOST_ONCE
    stores_progress: ClassVar[bool] = False

    def __init__(self, make: Callable[[], Any], file: Path) -> None:
        self._inner: Any = make()
        self._inner.serve_history(RecordedHistory(file))
        self._file = file

    def open(self) -> bytes | None:
        opened: bytes | None = self._inner.open()
        return opened

    def send(self, events: Sequence[Event]) -> None:
        with self._file.open("ab") as content:
            content.write(pickle.dumps(list(events)))
        self._inner.send(events)

    def commit(self, progress: bytes) -> None:
        self._inner.commit(progress)

    def close(self) -> None:
        self._inner.close()


def recorded(make: Callable[[], Any], file: Path) -> Destination:
    """A destination that can be made again in another process."""
    return RecordedDestination(make, file)


def example(name: str) -> ModuleType:
    """A module of `deploy/examples`."""
    spec = spec_from_file_location(name, ROOT / "deploy" / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
