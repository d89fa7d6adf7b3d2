"""Two drivers merge the same ranges into one target at the same time, while another client compacts its files."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Barrier, Event

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc.errors import CdcError
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import batch, gone, put
from tests.pipelines.sinks.added_features import items_by_id

KEYS = 40


class Driver:
    """A sink with its own key index."""

    def __init__(self, folder: Path, name: str) -> None:
        settings = DeltaSettings("lake", f"{folder}/lake", Writer.INDEXED, index_folder=f"{folder}/{name}")
        self.sink = DeltaSink(settings)
        self.sink.open("log-1")
        self.refused = 0

    def run(self, batches: list[TableBatch], together: Barrier) -> None:
        """Merge all batches, each at the same moment as the other driver."""
        for one in batches:
            together.wait(30)
            while True:
                try:
                    self.sink.apply(one)
                    break
                except CdcError:
                    self.refused += 1
        self.sink.close()


def random_batches(random: Random, rounds: int) -> tuple[list[TableBatch], dict[int, str]]:
    """Return batches and the items that they leave, by id."""
    made, items = [], dict[int, str]()
    for number in range(1, rounds + 1):
        start, rows = 10 * number, []
        for position, id_ in enumerate(random.sample(range(KEYS), random.randint(1, 8)), start=start + 1):
            if id_ in items and random.random() < 0.3:
                rows.append(gone(id_, position))
                del items[id_]
            else:
                items[id_] = f"{id_} at {position}"
                rows.append(put(id_, items[id_], position))
        made.append(batch(rows, start, start + 10))
    return made, items


def compact(uri: str, done: Event) -> None:
    """Merge small files until the drivers are done; a conflict ends an attempt."""
    while not done.wait(0.05):
        with suppress(DeltaError):
            DeltaTable(uri).optimize.compact()


@pytest.mark.parametrize("rounds", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_two_drivers_at_once_merge_each_range_once(rounds: int, tmp_path: Path) -> None:
    first, second = Driver(tmp_path, "first"), Driver(tmp_path, "second")
    batches, items = random_batches(Random(rounds), rounds)
    uri = first.sink.apply(batch([put(KEYS, "stays", 5)], 0, 10)).target
    together, done = Barrier(2), Event()
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(driver.run, batches, together) for driver in (first, second)]
        client = threads.submit(compact, uri, done)
        wait(running)
        done.set()
        for one in (*running, client):
            one.result()

    assert items_by_id(uri) == {**items, KEYS: "stays"}
    merged = Counter[int]()
    for commit in sorted(Path(uri, "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        merged.update(action["txn"]["version"] for action in actions if "txn" in action)
    assert merged == {10 * number: 1 for number in range(1, rounds + 2)}
