"""A log of many small segments that is compacted and trimmed, and the same log as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from cdc.catalog import Catalog
from cdc.log.compacted_table import CompactedState, read_compacted_state
from cdc.log.reader import LogReader
from cdc.log.trim_plan import Retention, plan_trim
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.replay_pause import ReplayPauses
from pipelines.sink_lifecycle import SinkRunner
from pipelines.sink_parts import SinkParts
from tests.pipelines.cold_log import EACH_OF_ITS_OWN
from tests.pipelines.shop_pipeline import END, FIGURES, ITEMS, ORDERS, Rows, ShopPipeline, change, make_shop
from tests.pipelines.spark_starts import spark_with

KEEP, NOBODY = Retention(max_age=1e12, grace=3600.0), Retention(max_age=1.0, grace=3600.0)
"""Wait for every consumer, and wait for nobody: the log's commits are of 2023."""


class Shop:
    """What shop.orders and shop.items hold, changed at random: the log of it is one that a source could write."""

    def __init__(self, seed: int) -> None:
        self._random, self._position = Random(seed), END
        self._keys = {ORDERS: {*range(50), 104} - {4}, ITEMS: {7, 8}}

    def transaction(self) -> tuple[int, list[dict[str, Any]]]:
        """(position, rows) of the next one."""
        self._position += 10
        rows: list[dict[str, Any]] = []
        for _ in range(self._random.randint(1, 4)):
            rows += self._change(len(rows))
        return self._position, rows

    def _change(self, ordinal: int) -> list[dict[str, Any]]:
        of = self._random.choice([ORDERS, ORDERS, ITEMS])
        place, keys, note = (self._position, ordinal), self._keys[of], f"n{self._position}.{ordinal}"
        free, what = self._random.choice([k for k in range(80) if k not in keys]), self._random.random()
        if what < 0.25 or not keys:
            keys.add(free)
            return [change(*place, free, note, of=of)]
        key = self._random.choice(sorted(keys))
        if what < 0.5:
            keys.discard(key)
            return [change(*place, key, None, of=of, op="d", after=None)]
        if what < 0.65:  # the row moves, and its note is not sent
            keys.symmetric_difference_update({key, free})
            gone = change(*place, key, None, of=of, op="d", after=None)
            image, old = [(1, str(free))], [str(key)]
            return [
                gone,
                change(place[0], ordinal + 1, free, None, of=of, op="u", after=image, partial=True, old_key=old),
            ]
        if what < 0.75:
            return [change(*place, key, None, of=of, op="u", after=[(1, str(key))], partial=True)]
        return [change(*place, key, note, of=of, op="u")]


class TrimmedAndWholeLog:
    """Two pipelines with one history: `cut` is compacted and trimmed, the whole one never is."""

    def __init__(self, folder: Path, seed: int = 1) -> None:
        self.cut = make_shop(folder / "cut", EACH_OF_ITS_OWN)
        self._shop, self._not_in_whole = Shop(seed), list[tuple[int, list[dict[str, Any]]]]()
        self._folder, self.root = folder, folder / "cut" / "log"

    def append(self, count: int, each: int = 1) -> int:
        """Add transactions, so many to a segment; where they end. The whole log gets them once it is looked at."""
        several = [self._shop.transaction() for _ in range(count)]
        for some in (several[start : start + each] for start in range(0, count, each)):
            self.cut.append(some[-1][0], [row for _, rows in some for row in rows])
        self._not_in_whole += several
        return several[-1][0]

    def compact(self, retention: Retention = KEEP) -> CompactedState:
        """Compact what is cold, and trim what may go."""
        compact(None, self.root)
        trim = plan_trim(self.root, retention)
        if trim is not None:
            self.cut.writer.trim(trim.segments, trim.upto)
        held = read_compacted_state(self.root)
        assert held is not None
        return held

    @property
    def oldest(self) -> Position:
        """Of the log that is trimmed."""
        return LogReader(self.root).oldest

    @cached_property
    def _whole(self) -> ShopPipeline:
        """With what both began with."""
        return make_shop(self._folder / "whole")

    def expected(self, sink: str = "lake") -> Rows:
        """What a sink that read every change holds."""
        if self._not_in_whole:
            rows = [row for _, rows in self._not_in_whole for row in rows]
            self._whole.append(self._not_in_whole[-1][0], rows)
            self._not_in_whole.clear()
        apply_all(self._whole, sink)
        return self._whole.lake() if sink == "lake" else self._whole.found()


@contextmanager
def running_sink(shop: ShopPipeline, sink: str = "lake", session: Any = None) -> Iterator[SinkRunner]:
    """A sink as the apply process has it, to be looked at again and again; without a session until Spark is awaited."""
    wanted = next(s for s in shop.definition.sinks if s.name == sink)
    with Catalog.open(shop.definition.catalog.url) as catalog:
        parts = SinkParts(CutRequests(catalog, "shop"), ReplayPauses(catalog, "shop"), FIGURES, spark_with(session))
        assert parts.first_batch.enter("another's query, which never ends to")
        query = SinkRunner(shop.definition, wanted, parts)
        try:
            yield query
        finally:
            query.stop()


def apply_all(shop: ShopPipeline, sink: str = "lake") -> None:
    """Bring a sink to the log's end as the apply process does before Spark is there."""
    end = LogReader(shop.definition.log.path).durable or 0
    with running_sink(shop, sink) as query:
        while (record := query.progress.to_sink()) is None or (record.state == "running" and record.position < end):
            query.step()
        assert record.state == "running", record.reason
