"""Cuts on their way from a sink to the views: one at a time, pinned until a later one was computed."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

from cdc.targets.published_record import Published
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.views.input_cuts import InputCuts
from tests.contracts.folded import batch, put


class PinnedLake:
    """A Delta sink with one table, and which of its cuts are pinned."""

    def __init__(self, folder: Path) -> None:
        self.sink = DeltaSink(DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}"))
        self.sink.open("log-1")
        self._upto = 0

    def publish(self, upto: int) -> Published:
        applied = self.sink.apply(batch([put(upto, "o", upto)], self._upto, upto, generation=None if self._upto else 1))
        record = Published(upto, upto, {1: applied})
        self.sink.publish(record)
        self._upto = upto
        return record

    @property
    def pinned(self) -> int:
        return len(self.sink._maintenance._pinned)


def test_a_cut_is_pinned_until_a_later_one_was_computed(tmp_path: Path) -> None:
    lake, cuts = PinnedLake(tmp_path), InputCuts("lake")
    cuts.offer(lake.sink, lake.publish(20))
    assert lake.pinned == 0  # nobody waits for it

    assert cuts.take(0) is None
    for upto in (40, 60):
        record = lake.publish(upto)
        cuts.offer(lake.sink, record)
        cuts.offer(lake.sink, record)
        assert cuts.take(1) == record
        assert lake.pinned == upto // 20 - 1
        cuts.keep(set())
        assert cuts.take(0) is None
    cuts.offer(lake.sink, record)
    assert lake.pinned == 1


def test_a_cut_stays_pinned_while_it_is_in_use(tmp_path: Path) -> None:
    lake, cuts = PinnedLake(tmp_path), InputCuts("lake")
    for upto, in_use, pinned in ((20, set(), 1), (40, {20}, 2), (60, {20}, 3), (80, {60}, 3), (100, set(), 3)):
        cuts.take(0)
        cuts.offer(lake.sink, lake.publish(upto))
        assert cuts.take(1) is not None
        assert lake.pinned == pinned
        cuts.keep(in_use)
    cuts.take(0)
    cuts.offer(lake.sink, lake.publish(120))
    assert lake.pinned == 2


def test_who_waits_gets_the_next_cut(tmp_path: Path) -> None:
    lake, cuts, found = PinnedLake(tmp_path), InputCuts("lake"), list[Published | None]()
    waiting = Thread(target=lambda: found.append(cuts.take(30)))
    waiting.start()
    record = lake.publish(20)
    while waiting.is_alive():
        cuts.offer(lake.sink, record)
        waiting.join(0.01)
    assert found == [record]
