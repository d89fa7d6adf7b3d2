"""Beside each other: one appends and trims, one compacts, one sweeps, and whoever reads then reads the truth."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from cdc.log.consumers import Consumer, register
from cdc.log.reader import LogReader
from cdc.log.trim_plan import Retention, plan_trim
from cdc.log.vacuum import vacuum
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from tests.log.rows import IDENTITY, info, row, table
from tests.log.simple_compaction import Row, compact, latest_state, open_compactor, read_range

GRACE = Retention(max_age=1e9, grace=30.0)
"""Seconds: longer than any view here lives."""


class Beside:
    """The processes of a log as threads; the first failure of any ends all."""

    def __init__(self, root: Path, commits: int) -> None:
        self.root, self.commits, self.every = root, commits, list[Row]()
        self.writer = LogWriter.open(root, IDENTITY, SegmentLimits(size=1, age=3600.0))
        self.done, self.failures, self.reads, self.trimmed = Event(), list[BaseException](), 0, 0

    def run(self) -> None:
        self.append()
        others = (self.compacts, self.sweeps, self.reads_anew, self.reads_on)
        threads = [Thread(target=self.guard, args=(work,)) for work in (self.writes, *others)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert self.failures == []

    def guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as failure:
            self.failures.append(failure)
        finally:
            if work == self.writes or self.failures:
                self.done.set()

    def append(self) -> None:
        at = (self.writer.durable or 0) + 1
        rows = [
            row(at, n, key=[str(random.randrange(20))], op=random.choice("ccd"), after=[(1, str(at))]) for n in range(2)
        ]
        self.every += rows
        self.writer.commit(self.writer.stage(table(*rows)), info(at))

    def writes(self) -> None:
        for number in range(self.commits):
            self.append()
            if number % 4 == 0 and (trim := plan_trim(self.root, GRACE)) is not None:
                self.writer.trim(trim.segments, trim.upto)
                self.trimmed += 1
            if self.failures:
                return

    def compacts(self) -> None:
        writer = open_compactor(self.root)
        while not self.done.is_set():
            closed = LogReader(self.root).segments()[:-1]
            if closed and closed[-1].last > writer.horizon:
                compact(self.root, closed[-1].last, writer=writer, merge=len(writer.runs) > 3)
                register(self.root, Consumer("c", "lake", closed[-1].last))

    def sweeps(self) -> None:
        while not self.done.wait(0.01):
            vacuum(self.root, GRACE)

    def reads_anew(self) -> None:
        while not self.done.is_set():
            log = LogReader(self.root)
            upto = log.durable or Position(0)
            self.check(latest_state(read_range(log, Position(0), upto)), upto)

    def reads_on(self) -> None:
        log, at, state = LogReader(self.root), Position(0), dict[Any, Any]()
        while not self.done.is_set():
            log.refresh()
            upto = log.latest_boundary(at, random.choice([None, 1, 5]))
            state, at = latest_state(read_range(log, at, upto), state), upto
            self.check(state, upto)

    def check(self, state: object, upto: Position) -> None:
        assert state == latest_state([r for r in list(self.every) if r["position"] <= upto])
        self.reads += 1


def test_readers_beside_trimming_and_compaction_see_every_state_whole(tmp_path: Path):
    beside = Beside(tmp_path, 25)
    beside.run()
    assert beside.reads


@pytest.mark.slow
def test_readers_beside_much_trimming_and_compaction_see_every_state_whole(tmp_path: Path):
    beside = Beside(tmp_path, 400)
    beside.run()
    assert beside.reads > 100
    assert beside.trimmed > 5
