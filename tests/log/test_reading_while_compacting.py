"""Torture: every key is written five times while the log is compacted and trimmed all the time.

Whoever reads it in the end holds the last value of each key and no key that is deleted: from the beginning, live, after
a pause as long as its word held the log, and after one that was longer, once it is told to rebuild and has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from threading import Event, Thread
from time import time_ns
from typing import Self

import numpy as np
import pyarrow as pa
import pytest

from cdc.errors import LogCorrupt, LogFenced, LogTrimmed
from cdc.log.consumers import Consumer, forget, register
from cdc.log.disk_format import CommitInfo
from cdc.log.reader import LogReader
from cdc.log.trim_plan import Retention, plan_trim
from cdc.log.vacuum import vacuum
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from tests.fixtures.waiting import until
from tests.log.rows import IDENTITY

PER_KEY = 5
IN_TRANSACTION = 10
GRACE = Retention(max_age=1e9, grace=120.0)
"""Seconds: longer than any view here lives; segments wait for every consumer that is registered."""
DELETED = 0.2
"""Share of the messages."""

Values = dict[str, str]


class Messages:
    """Of which key each is, and what it says; None takes the key away."""

    def __init__(self, number: int, random: Random) -> None:
        self.keys = [str(n // PER_KEY) for n in range(number)]
        random.shuffle(self.keys)
        self.values = [None if random.random() < DELETED else f"v{n}" for n in range(number)]

    def last(self) -> Values:
        """Key → its last value, of those that are there in the end."""
        held = dict(zip(self.keys, self.values, strict=True))
        return {key: value for key, value in held.items() if value is not None}

    def rows(self, start: int, stop: int) -> pa.Table:
        """Messages as whole transactions of the log."""
        keys, values, count = self.keys[start:stop], self.values[start:stop], stop - start
        numbers, offsets = np.arange(start, stop), np.arange(count + 1, dtype=np.int32)
        gone = pa.array([value is None for value in values])
        images = pa.MapArray.from_arrays(offsets, pa.array(np.ones(count, np.int32)), pa.array(values, pa.string()))
        told = {
            "position": pa.array(numbers // IN_TRANSACTION + 1),
            "ordinal": pa.array(numbers % IN_TRANSACTION),
            "xid": pa.array(np.ones(count, np.int64)),
            "committed_at": pa.array(np.full(count, time_ns() // 1000)),
            "relation": pa.array(np.full(count, 16384)),
            "topic": pa.array(["shop.orders"] * count),
            "op": pa.array(["d" if value is None else "u" for value in values]),
            "key": pa.ListArray.from_arrays(offsets, pa.array(keys)),
            "after": pa.array(
                [None if g else i for g, i in zip(gone.to_pylist(), images.to_pylist(), strict=True)], images.type
            ),
            "partial": pa.array(np.zeros(count, bool)),
        }
        nothing = {field.name: pa.nulls(count, field.type) for field in LOG_SCHEMA if field.name not in told}
        return pa.table({name: (told | nothing)[name] for name in LOG_SCHEMA.names}).cast(LOG_SCHEMA)


class Follower:
    """A consumer: what it has made of the log so far, and its word beside it."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name, self.at, self.values = root, name, Position(0), Values()

    def follow(self, upto: Position | None = None) -> None:
        """Read what is new, keep it, and say so; raises LogTrimmed."""
        log = LogReader(self.root)
        end = upto or log.latest_boundary(self.at)
        self._take(pa.Table.from_batches(log.rows(self.at, end), LOG_SCHEMA))
        self.at = end
        register(self.root, Consumer(self.name, self.name, end, seen_at=time_ns() // 1000))

    def rebuild(self) -> None:
        """From the beginning."""
        self.at, self.values = Position(0), {}
        self.follow()

    def _take(self, rows: pa.Table) -> None:
        ordered = rows.select(["position", "ordinal", "op", "key", "after"]).sort_by(
            [("position", "ascending"), ("ordinal", "ascending")]
        )
        for op, (key,), image in zip(*(ordered[name].to_pylist() for name in ("op", "key", "after")), strict=True):
            if op == "d":
                self.values.pop(key, None)
            else:
                self.values[key] = image[0][1]


class Torture:
    """The processes of one log as threads; the first failure of any ends all."""

    def __init__(self, root: Path, messages: Messages, in_commit: int, compactors: int = 1) -> None:
        self._compactors, self.refused = compactors, list[Exception]()
        self.root, self.messages, self.in_commit, self.sent = root, messages, in_commit, 0
        self.writer = LogWriter.open(root, IDENTITY, SegmentLimits(size=1, age=3600.0))
        self.live, self.failures, self._done = Follower(root, "live"), list[BaseException](), Event()
        self._threads = [
            Thread(target=self._guard, args=(work,)) for work in (*[self._compacts] * compactors, self._follows)
        ]

    def __enter__(self) -> Self:
        self.send(self.in_commit)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()
        assert self.failures == []

    def send(self, number: int) -> None:
        """So many messages more; what may go of the log meanwhile does."""
        for start in range(self.sent, self.sent + number, self.in_commit):
            self.sent = start + self.in_commit
            rows = self.messages.rows(start, self.sent)
            last = Position(self.sent // IN_TRANSACTION)
            self.writer.commit(self.writer.stage(rows), CommitInfo(last=last, committed_at=1, timeline=1))
            self.keep_small()

    def keep_small(self) -> None:
        """What the reader's process does between two commits."""
        if (trim := plan_trim(self.root, GRACE)) is not None:
            self.writer.trim(trim.segments, trim.upto)
        vacuum(self.root, GRACE)

    def oldest(self) -> Position:
        """Where the single changes begin."""
        return LogReader(self.root).oldest

    def floor(self) -> Position:
        """Up to where deletes are forgotten."""
        held = LogReader(self.root).compacted
        return Position(0) if held is None else held.floor

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait, while the log is kept small, until it holds."""

        def kept() -> bool:
            assert self.failures == []
            self.keep_small()
            return holds()

        until(kept, what)

    def _guard(self, work: Callable[[], object]) -> None:
        try:
            while not self._done.wait(0.02):
                work()
        except BaseException as failure:
            self.failures.append(failure)

    def _compacts(self) -> None:
        try:
            compact(None, self.root)
        except (LogFenced, LogCorrupt, OSError) as refused:  # its files were taken away by another one
            if self._compactors == 1:
                raise
            self.refused.append(refused)

    def _follows(self) -> None:
        self.live.follow()


@pytest.mark.parametrize(
    ("number", "in_commit"),
    [(800, 100), pytest.param(1_000_000, 10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_every_consumer_of_a_log_under_torture_holds_the_last_value_of_each_key(
    tmp_path: Path, number: int, in_commit: int
) -> None:
    messages = Messages(number, Random(7))
    quarter = number // 4
    patient, gone = Follower(tmp_path, "patient"), Follower(tmp_path, "gone")
    with Torture(tmp_path, messages, in_commit) as torture:
        torture.send(quarter - in_commit)
        patient.follow()
        gone.follow()
        torture.send(quarter)
        torture.until(lambda: torture.oldest() > 0, "something is trimmed")
        assert torture.oldest() <= patient.at, "a registered consumer holds what it has not read"
        assert torture.floor() <= gone.at
        forget(tmp_path, gone.name)
        patient.follow()
        torture.send(quarter)
        patient.follow()
        torture.send(quarter)
        patient.follow()
        torture.until(lambda: torture.live.at == number // IN_TRANSACTION, "the live one is at the end")
        torture.until(lambda: gone.at < torture.floor(), "the deletes that one missed are forgotten")
        torture.until(lambda: gone.at < torture.oldest(), "the changes that one missed are trimmed")
    with pytest.raises(LogTrimmed, match="cannot be read from"):
        gone.follow()
    gone.rebuild()
    fresh = Follower(tmp_path, "fresh")
    fresh.follow()
    expected = messages.last()
    assert 0 < len(expected) < len(set(messages.keys))
    for one in (fresh, torture.live, patient, gone):
        assert one.values == expected, one.name


@pytest.mark.slow
@pytest.mark.parametrize(("number", "in_commit"), [(1_000, 50), (60_000, 500)])
def test_compactors_beside_each_other_refuse_each_other_and_harm_nothing(
    tmp_path: Path, number: int, in_commit: int
) -> None:
    messages = Messages(number, Random(8))
    with Torture(tmp_path, messages, in_commit, compactors=2) as torture:
        torture.send(number - in_commit)
        torture.until(lambda: torture.live.at == number // IN_TRANSACTION, "the live one is at the end")
        torture.until(lambda: torture.oldest() > 0, "something is trimmed")
    compact(None, tmp_path, everything=True)
    fresh = Follower(tmp_path, "fresh")
    fresh.follow()
    assert fresh.values == torture.live.values == messages.last()
