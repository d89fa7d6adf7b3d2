"""Hands published cuts of the sink that the views read to the view engine, and keeps them readable until it is done."""

from __future__ import annotations

from threading import Condition
from typing import NamedTuple

from cdc.stores.published_record import Published
from pipelines.sinks.contract import Sink


class _PinnedCut(NamedTuple):
    record: Published
    handle: str


class InputCuts:
    """The cuts of one sink that pass to the view engine; the sink's thread offers them, the engine's takes them.

    The engine reads two cuts at a time: the last one that it has computed, and the one that it computes. Both are
    pinned in the sink. After a restart the earlier one is only as readable as any kept cut of the sink.
    """

    def __init__(self, sink: str) -> None:
        self.sink = sink
        """Name of the sink."""
        self._changed = Condition()
        self._is_wanted = False
        self._offered: _PinnedCut | None = None
        self._taken: list[_PinnedCut] = []
        self._released: list[str] = []
        self._position = -1

    def offer(self, sink: Sink, record: Published) -> None:
        """Pin the published cut and hand it over, if the engine waits for one and has not had this one.

        Only the thread that applies batches to the sink may call this method.
        """
        with self._changed:
            released, self._released = self._released, []
            is_due = self._is_wanted and self._offered is None and record.position > self._position
        for handle in released:
            sink.release(handle)
        if not is_due:
            return
        handle = sink.pin(record)
        with self._changed:
            self._offered, self._position, self._is_wanted = _PinnedCut(record, handle), record.position, False
            self._changed.notify()

    def take(self, timeout: float) -> Published | None:
        """Return the next cut; None if the sink publishes none within `timeout` seconds."""
        with self._changed:
            self._is_wanted = True
            self._changed.wait_for(lambda: self._offered is not None, timeout)
            if self._offered is None:
                return None
            found, self._offered = self._offered, None
            self._taken.append(found)
            return found.record

    def keep_only_last(self) -> None:
        """Release all cuts that were taken before the last one."""
        with self._changed:
            self._released += [cut.handle for cut in self._taken[:-1]]
            del self._taken[:-1]
