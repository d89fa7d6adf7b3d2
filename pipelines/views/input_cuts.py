"""Hands published cuts of the sink that the views read to the view engine, and keeps them readable until it is done."""

from __future__ import annotations

from collections.abc import Collection
from threading import Condition
from typing import NamedTuple

from cdc.targets.published_record import Published
from pipelines.sinks.contract import Sink


class _PinnedCut(NamedTuple):
    record: Published
    handle: str


class InputCuts:
    """The cuts of one sink that pass to the view engine; the sink's thread offers them, the engine's takes them.

    The engine reads cuts that it has computed, and the one that it computes. All of them are pinned in the sink until
    `keep` leaves them out. After a restart the earlier ones are only as readable as any kept cut of the sink.
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
            self._offered = _PinnedCut(record, handle)
            self._position = record.position
            self._is_wanted = False
            self._changed.notify()

    def take(self, timeout: float) -> Published | None:
        """Return the next cut; None if the sink publishes none within `timeout` seconds."""
        with self._changed:
            self._is_wanted = True
            self._changed.wait_for(lambda: self._offered is not None, timeout)
            if self._offered is None:
                return None
            cut, self._offered = self._offered, None
            self._taken.append(cut)
            return cut.record

    def keep(self, positions: Collection[int]) -> None:
        """Release all cuts that were taken, except those at the given positions and the last one."""
        with self._changed:
            kept = [cut for cut in self._taken[:-1] if cut.record.position in positions] + self._taken[-1:]
            handles = {cut.handle for cut in kept}
            self._released += [cut.handle for cut in self._taken if cut.handle not in handles]
            self._taken = kept
