"""A table that is copied in chunks: however the log is cut into batches, nothing fails and the copy's end is exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from cdc import metrics
from cdc.catalog import Catalog
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.table import TableState
from cdc.targets.lake_reader import Lake, read_target
from cdc.targets.published_record import Published, TableRecord, TargetState
from cdc.targets.search_index_reader import SearchIndex
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.contract import Sink
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.search.sink import SearchSink
from tests.log.rows import IDENTITY, LIMITS, info
from tests.pipelines.copied_tables import FIRST, CopiedTable, Moment, merge_transactions, random_copied_tables
from tests.pipelines.fold_model import Image, to_arrow

TABLES = 2
KINDS = ["delta", "search"]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))]
Tables = dict[str, Image]


class Died(Exception):
    """The driver is gone."""


class MortalDelta(DeltaSink):
    """A Delta sink whose driver dies, when it is doomed, after all tables merged and before they are published."""

    doomed = False

    def publish(self, record: Published) -> None:
        if self.doomed:
            raise Died
        super().publish(record)


@dataclass
class Ground:
    """A log, one sink over it, and the loop that applies the one to the other."""

    folder: Path
    kind: str
    catalog: Catalog

    def write(self, tables: list[CopiedTable]) -> list[int]:
        """Put what the tables left into the log; returns the positions."""
        writer = LogWriter.open(self.folder / "log", IDENTITY, LIMITS)
        for position, rows in enumerate(merge_transactions(tables), FIRST):
            writer.commit(writer.stage(to_arrow(rows)), info(position))
        return list(range(FIRST, FIRST + len(merge_transactions(tables))))

    def opened(self) -> tuple[SinkLoop, Sink]:
        """A driver's loop and its sink."""
        delta = MortalDelta(DeltaSettings("it", f"{self.folder}/lake/{{schema}}/{{table}}"))
        sink = delta if self.kind == "delta" else SearchSink("it", self.folder / "find")
        fold = RangeFolder(LogReader(self.folder / "log"), "it", ("t.*",))
        loop = SinkLoop(sink, fold, CutRequests(self.catalog, "it"), SinkFigures("it", "it", metrics.Metrics()))
        loop.open()
        return loop, sink

    def published(self) -> Published:
        """What the sink says of itself."""
        if self.kind == "search":
            found = SearchIndex.open(self.folder / "find").published
        else:
            found = Lake.open(f"{self.folder}/lake/{{schema}}/{{table}}").published()
        assert found is not None
        return found

    def rows(self, record: TableRecord) -> Tables:
        """What the target holds, by key."""
        if self.kind == "search":
            found = [dict(r.source) for r in SearchIndex.open(self.folder / "find").documents(record.topic)]
        else:
            found = read_target(record.target, record.version).read_all().to_pylist()
        return {str(row["c1"]): {n: row[f"c{n}"] for n in range(1, 5)} for row in found}

    def check(self, tables: list[CopiedTable], position: int) -> None:
        """Every table stands at the position as it did at the source; while it is copied, what is there is true."""
        published = self.published()
        assert published.position == position
        for table in tables:
            moment = table.story[min(position - FIRST, len(table.story) - 1)]
            record = published.tables.get(table.relation)
            if record is None or moment.state is None:
                assert record is None
                assert moment.state is None
            elif record.position != position:  # a crash left it ahead
                assert record.state in {TargetState.CATCHING_UP, TargetState.SNAPSHOTTING}
            else:
                copying = moment.state is TableState.SNAPSHOTTING
                assert record.state == (TargetState.SNAPSHOTTING if copying else TargetState.STREAMING)
                self._compare(table, moment, self.rows(record))

    def _compare(self, table: CopiedTable, moment: Moment, held: Tables) -> None:
        story = [row for m in table.story for row in m.rows]
        if moment.exact:
            assert held == moment.table, story
        elif moment.first:
            assert {key: image for key, image in held.items() if moment.table.get(key) != image} == {}, story


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    """An empty ground for each kind of sink."""
    with Catalog.open(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        yield Ground(tmp_path, request.param, catalog)


def some(positions: list[int], random: Random) -> list[int]:
    """Where batches end: here and there, and at the last."""
    return sorted({*random.sample(positions, random.randint(2, 8)), positions[-1]})


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_the_batches_no_table_fails_and_the_end_of_a_copy_is_exact(shop: Ground, seed: int) -> None:
    tables = random_copied_tables(seed, TABLES)
    ends = some(shop.write(tables), Random(seed))
    loop, sink = shop.opened()
    with closing(sink):
        for end in ends:
            loop(None, Position(end))
            shop.check(tables, end)
        loop.drain()


@pytest.mark.parametrize("shop", ["delta"], indirect=True)  # an index is written by one commit with its record
@pytest.mark.parametrize("seed", SEEDS)
def test_a_driver_that_died_after_merging_and_cuts_the_log_elsewhere_goes_on_exactly(shop: Ground, seed: int) -> None:
    tables, random = random_copied_tables(seed, TABLES), Random(seed)
    positions = shop.write(tables)
    loop, sink = shop.opened()
    for end in some(positions, random):
        if random.random() < 0.7:
            assert isinstance(sink, MortalDelta)
            sink.doomed = True
            with pytest.raises(Died):
                loop(None, Position(random.choice([p for p in positions if p >= end])))
            sink.close()
            loop, sink = shop.opened()
        loop(None, Position(end))
        shop.check(tables, end)
    loop.drain()
    sink.close()


def resynced(seed: int) -> tuple[CopiedTable, int]:
    """A table that nobody watched for a while, and where that was noticed."""
    table = CopiedTable(1, Random(seed))
    table.unseen(4)
    table.copy()
    table.changes(1)
    table.exact = False
    table.mark(TableState.NEEDS_RESYNC, "rows were written that the stream does not carry")
    noticed = table.position
    table.commit()
    table.unseen(3)
    table.copy()
    table.changes(1)
    return table, noticed


def brought_back(shop: Ground, loop: SinkLoop, sink: Sink) -> tuple[SinkLoop, Sink]:
    """Another driver, which brings what lags to where the sink stands, as every driver does first."""
    loop.drain()
    sink.close()
    loop, sink = shop.opened()
    for table in loop.lagging_tables:
        loop.catch_up(table, None)
    assert not loop.needs_reopen
    return loop, sink


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_a_stopped_table_comes_back_at_the_end_of_its_resync(shop: Ground, seed: int) -> None:
    table, noticed = resynced(seed)
    positions = shop.write([table])
    loop, sink = shop.opened()
    states = []
    for position in positions:
        loop(None, Position(position))
        if loop.needs_reopen:
            loop, sink = brought_back(shop, loop, sink)
        states.append(shop.published().tables[1].state)
        if table.story[position - FIRST].exact:
            shop.check([table], position)
    last = next(n for n, moment in reversed(list(enumerate(table.story))) if not moment.exact)
    assert set(states[noticed - FIRST : last + 1]) == {TargetState.FAILED}
    loop.drain()
    sink.close()


@pytest.mark.parametrize("shop", ["delta", pytest.param("search", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_a_driver_that_starts_during_a_resync_goes_on_with_the_table_that_had_stopped(shop: Ground, seed: int) -> None:
    table, noticed = resynced(seed)
    positions = shop.write([table])
    loop, sink = shop.opened()
    for position in positions:
        loop(None, Position(position))
        if position > noticed:
            loop, sink = brought_back(shop, loop, sink)
        if position != noticed:
            shop.check([table], position)
    loop.drain()
    sink.close()
