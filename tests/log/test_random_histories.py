"""A log on the disk: whatever is compacted, trimmed, swept and started anew, it folds to what was written to it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import LogTrimmed
from cdc.log.consumers import Consumer, register
from cdc.log.reader import LogReader
from cdc.log.trim_plan import Retention, plan_trim
from cdc.log.vacuum import vacuum
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from tests.fixtures.examples import examples
from tests.log.rows import IDENTITY, info, row, schema_of, table
from tests.log.simple_compaction import Row, compact, latest_state, open_compactor, read_range

EVERY = SegmentLimits(size=1, age=3600.0)
State = dict[Any, Any]


@dataclass
class Sink:
    """Keeps the state at its position, reads in batches, and says where it is only now and then."""

    name: str
    log: LogReader
    position: Position = field(default_factory=Position)
    state: State = field(default_factory=dict)


class World:
    """A log, its processes, and all that was ever written."""

    def __init__(self, root: Path) -> None:
        self.root, self.every = root, list[Row]()
        self.writer = LogWriter.open(root, IDENTITY, EVERY)
        said = row(1, op="s", key=None, payload=schema_of().to_json())
        self.write([said])
        self.compactor = open_compactor(root)
        self.sinks = [Sink(name, LogReader(root)) for name in "xy"]

    def write(self, rows: list[Row]) -> None:
        self.writer.commit(self.writer.stage(table(*rows)), info(rows[-1]["position"]))
        self.every += rows

    def append(self, changes: list[tuple[str, bool]]) -> None:
        """Two transactions of a commit, each with a half of the changes, later ones of a key only."""
        at = self.writer.durable or 0
        placed = {(at + 1 + 2 * n // len(changes), key): alive for n, (key, alive) in enumerate(changes)}
        rows = [
            row(position, n, key=[key], op="c" if alive else "d", after=[(1, str(n))] if alive else None)
            for n, ((position, key), alive) in enumerate(placed.items())
        ]
        self.write(rows)

    def compact(self, merge: bool, floor: bool) -> None:
        """Up to the end of the last segment that is closed."""
        closed = LogReader(self.root).segments()[:-1]
        upto = max([one.last for one in closed], default=Position(0))
        if upto > self.compactor.horizon:
            low = min(sink.position for sink in self.sinks) if floor else 0
            compact(self.root, upto, writer=self.compactor, merge=merge, floor=min(low, upto) if merge else 0)

    def trim(self, max_age: float) -> None:
        trim = plan_trim(self.root, Retention(max_age=max_age, grace=0.0))
        if trim is not None:
            self.writer.trim(trim.segments, trim.upto)

    def sweep(self) -> None:
        """Nobody holds an old view by now."""
        for sink in self.sinks:
            sink.log.refresh()
        vacuum(self.root, Retention(max_age=0.0, grace=0.0))

    def restart(self) -> None:
        self.writer, self.compactor = LogWriter(self.root, EVERY), open_compactor(self.root)

    def register(self, number: int) -> None:
        sink = self.sinks[number]
        register(self.root, Consumer(sink.name, sink.name, sink.position))

    def read(self, number: int, max_rows: int | None, refresh: bool) -> None:
        sink = self.sinks[number]
        if refresh:
            sink.log.refresh()
        compacted = sink.log.compacted
        if compacted is not None and 0 < sink.position < min(sink.log.oldest, compacted.floor):
            with pytest.raises(LogTrimmed):
                sink.log.files(sink.position, sink.log.durable or Position(0))
            sink.position, sink.state = Position(0), {}
        upto = sink.log.latest_boundary(sink.position, max_rows)
        sink.state = latest_state(read_range(sink.log, sink.position, upto), sink.state)
        sink.position = upto
        assert sink.state == latest_state([r for r in self.every if r["position"] <= upto])


changes = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=4)
number = st.integers(0, 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), changes),
        st.tuples(st.just("compact"), st.booleans(), st.booleans()),
        st.tuples(st.just("trim"), st.sampled_from([0.0, 1e9])),
        st.tuples(st.just("sweep")),
        st.tuples(st.just("restart")),
        st.tuples(st.just("register"), number),
        st.tuples(st.just("read"), number, st.none() | st.integers(1, 4), st.booleans()),
    ),
    min_size=8,
    max_size=30,
)


def play(first: list[Any], script: list[tuple[Any, ...]]) -> None:
    with ExitStack() as stack:
        world = World(Path(stack.enter_context(TemporaryDirectory())))
        for step, *given_ in [*(("append", one) for one in first), *script]:
            getattr(world, step)(*given_)
        for sink in (0, 1):
            world.read(sink, 1, refresh=True)
            world.read(sink, None, refresh=True)
        new = LogReader(world.root)
        assert latest_state(read_range(new, Position(0), new.durable or Position(0))) == latest_state(world.every)
        assert [place.position for place, _ in new.schema_history()] == [1]


@given(st.lists(changes, min_size=2, max_size=4), steps)
@examples(4)
def test_every_reader_comes_to_what_was_written(first: list[Any], script: list[tuple[Any, ...]]):
    play(first, script)


@pytest.mark.slow
@given(st.lists(changes, min_size=2, max_size=4), steps)
@examples(60)
def test_every_reader_comes_to_what_was_written_in_many_histories(first: list[Any], script: list[tuple[Any, ...]]):
    play(first, script)
