"""Random changes, killed drivers, lost answers, late requests and a killed server: documents end as the rows.

A driver that dies is a process of its own, killed by SIGKILL at one of the failpoints of the sink. The server forgets
deleted documents at once or after a second, and every batch is applied twice.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Event, Thread

import pytest

from cdc.config import SearchSinkDefinition
from cdc.errors import MissingBase, SinkUnavailable
from cdc.failpoint import VARIABLE
from cdc.targets.search_server.reader import SearchServerReader
from pipelines.sinks.search_server.sink import SearchServerSink
from tests.contracts.histories import TABLE, Table, batch, ours
from tests.contracts.stories import log
from tests.faults.torture_driver import FAILPOINTS, LOG, apply_range
from tests.fixtures import forked
from tests.fixtures.http_relay import CutAnswer, HttpRelay, LoseAnswer
from tests.fixtures.opensearch import OpenSearchServer, SharedOpenSearch
from tests.fixtures.search_sinks import search_sink
from tests.pipelines.fold_model import Row

LOST = 0.05
"""Share of the answers that are lost."""
TOPIC = TABLE.topic


class Torture:
    """Drivers that apply one log to one sink in random batches, and die."""

    def __init__(self, find: SearchSinkDefinition, rows: list[Row], random: Random, folder: Path) -> None:
        self._find, self._rows, self._random, self._folder = find, rows, random, folder
        self.kills: list[str] = []
        """The failpoints at which a driver was killed."""
        self._published = 0
        (folder / "rows").write_bytes(pickle.dumps(rows))
        self._late = self._opened()
        """A driver that was replaced long ago, and that does not know it."""
        self.sink = self._opened()

    def run(self) -> None:
        """Apply the whole log."""
        ends, after = sorted({row["position"] for row in self._rows}), 0
        done: list[tuple[int, int]] = []
        while after < ends[-1]:
            later = [end for end in ends if end > after][:8]
            if self._random.random() < 0.4:
                self._kill_a_driver(after, self._random.choice(later))
                if self._published > after:  # killed after its commit, so the next driver continues there
                    after = self._published
                    continue
            upto = self._random.choice(later)
            self._apply(after, upto)
            done.append((after, upto))
            after = upto
            if self._random.random() < 0.3:
                self._apply_late(*self._random.choice(done))

    def _opened(self) -> SearchServerSink:
        while True:
            sink = SearchServerSink(self._find)
            with suppress(SinkUnavailable):
                record = sink.open(LOG)
                self._published = 0 if record is None else record.position
                return sink

    def _apply(self, after: int, upto: int) -> None:
        while True:
            with suppress(SinkUnavailable):  # the loop of the apply process tries again as well
                apply_range(self.sink, self._rows, after, upto)
                return
            self.sink = self._opened()

    def _kill_a_driver(self, after: int, upto: int) -> None:
        """Let another driver apply a range, in a process that is killed; it ends by itself if its range has no rows."""
        failpoint, file = self._random.choice(FAILPOINTS), self._folder / "rows"
        driver = ("tests.faults.torture_driver", self._find.model_dump_json(exclude_unset=True), file, after, upto)
        died = forked.run(*driver, environment={VARIABLE: failpoint})
        assert died.status in {0, -signal.SIGKILL}, died.errors
        if died.status:
            self.kills.append(failpoint)
        self.sink = self._opened()

    def _apply_late(self, after: int, upto: int) -> None:
        with suppress(SinkUnavailable, MissingBase):
            self._late.apply(batch(self._rows, after, upto, every=False))
        if self._random.random() < 0.5:
            self._late = self._opened()


def expected(rows: list[Row]) -> dict[str, dict[str, str | None]]:
    """Return the rows of the source after the log."""
    table = Table()
    for row in ours(rows):
        table.apply(row)
    names = {column.id: column.name for column in TABLE.columns}
    return {key: {names[id_]: image.get(id_) for id_ in names} for key, (_, image) in table.rows.items()}


def found(find: SearchSinkDefinition) -> dict[str, dict[str, str | None]]:
    """Return the rows of the index."""
    rows = list(SearchServerReader.open(find).documents(TOPIC))
    assert len({row.key for row in rows}) == len(rows)
    return {row.key[0]: dict(row.source) for row in rows if row.key[0] is not None}


@pytest.fixture
def lossy(opensearch, opensearch_relay: HttpRelay) -> Iterator[SearchSinkDefinition]:
    opensearch_relay.fault(r"^(PUT|POST|DELETE) ", LoseAnswer(), times=None, probability=LOST)
    opensearch_relay.fault(r"/_bulk", CutAnswer(), times=None, probability=LOST)
    yield search_sink(opensearch, url=opensearch_relay.url, settings={"gc_deletes": "0s"})
    opensearch_relay.faults.clear()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_any_batches_with_lost_answers_and_late_requests_give_the_rows(
    lossy: SearchSinkDefinition, tmp_path: Path, seed: int
):
    random = Random(seed)
    rows = log(random, 20 if seed == 0 else 60)
    torture = Torture(lossy, rows, random, tmp_path)
    torture.run()

    assert torture.kills, "no driver was killed"
    assert found(lossy) == expected(rows)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_server_that_is_killed_at_random_moments_keeps_the_rows(
    own_opensearch: OpenSearchServer, tmp_path: Path, seed: int
):
    random = Random(f"killed {seed}")
    rows = log(random, 100)
    with HttpRelay(own_opensearch.url, seed) as relay:
        relay.fault(r"^(PUT|POST|DELETE) ", LoseAnswer(), times=None, probability=LOST)
        find = search_sink(SharedOpenSearch(relay.url, "t-"), settings={"gc_deletes": "1s"})
        done = Event()

        def kill() -> None:
            while not done.wait(random.uniform(1, 4)):
                own_opensearch.kill()
                own_opensearch.restart()

        killing = Thread(target=kill)
        torture = Torture(find, rows, Random(seed), tmp_path)
        killing.start()
        try:
            torture.run()
        finally:
            done.set()
            killing.join()
        relay.faults.clear()

        assert found(find) == expected(rows)
