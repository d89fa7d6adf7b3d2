"""Parking at random: any changes, cut into any batches, with a crash after any of them, end as the source stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pipelines.folding.fold import fold
from pipelines.sinks.contract import Published
from tests.contracts.folded import ORDERS
from tests.log.rows import row, table
from tests.pipelines.dead_letters.sink_driver import NAN, Driver

KEYS = "123456"
ID, ITEM, PRICE = 1, 2, 3
Image = dict[int, str]


@dataclass
class Source:
    """A table with a large column, which an update may leave alone and then does not send."""

    random: Random
    rows: dict[str, Image] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    position: int = 10

    def change(self) -> None:
        """One transaction of one change."""
        self.position += 1
        key = self.random.choice(KEYS)
        if key not in self.rows:
            self.put(key, op="c")
        else:
            self.random.choices((self.put, self.touch, self.move, self.delete), (3, 4, 2, 2))[0](key)

    def put(self, key: str, op: str = "u") -> None:
        self.rows[key] = {ID: key, ITEM: f"i{self.position}", PRICE: self._price()}
        self._say(key, self.rows[key], op=op)

    def touch(self, key: str) -> None:
        self.rows[key] |= {PRICE: self._price()}
        self._say(key, {ID: key, PRICE: self.rows[key][PRICE]}, partial=True)

    def move(self, key: str) -> None:
        free = sorted(set(KEYS) - self.rows.keys())
        if not free:
            return
        to = self.random.choice(free)
        self.rows[to] = {**self.rows.pop(key), ID: to, PRICE: self._price()}
        self._say(key, None, op="d")
        self._say(to, {ID: to, PRICE: self.rows[to][PRICE]}, ordinal=1, partial=True, old_key=[key])

    def delete(self, key: str) -> None:
        del self.rows[key]
        self._say(key, None, op="d")

    def read(self, key: str) -> None:
        """What a backfill of one key puts into the log."""
        self.position += 1
        if key in self.rows:
            self._say(key, self.rows[key], op="r")
        else:
            self._say(key, None, op="d")

    def _price(self) -> str:
        return NAN if self.random.random() < 0.35 else f"{self.position}.00"

    def _say(self, key: str, image: Image | None, op: str = "u", ordinal: int = 0, **fields: Any) -> None:
        after = None if image is None else list(image.items())
        said = {"relation": ORDERS.relation, "topic": ORDERS.topic, "key": [key], "after": after, "op": op}
        self.log.append(row(self.position, ordinal, **said, **fields))

    def between(self, after: int, upto: int) -> list[dict[str, Any]]:
        return [change for change in self.log if after < change["position"] <= upto]


def driven(driver: Driver, source: Source, upto: int) -> None:
    """Apply what the log has up to there, and publish."""
    known = driver.tables.get(ORDERS.relation)
    after = 0 if known is None else min(known.position, upto)
    images = fold(table(*source.between(after, upto)), sink="lake")
    driver.publish(driver.merge_folded(images, upto), upto)


def crashed(driver: Driver, source: Source, folder: Path, upto: int) -> Driver:
    """Apply, and publish nothing; the next driver begins where this one published."""
    known = driver.tables.get(ORDERS.relation)
    driver.merge_folded(fold(table(*source.between(known.position if known else 0, upto)), sink="lake"), upto)
    driver.sink.close()
    return Driver(folder)


def expect_true(driver: Driver, source: Source) -> None:
    """Every key stands as the source has it, or is listed with the row that the source has."""
    held = {one.key[0]: dict(one.image) for one in driver.quarantine.rows}
    assert sorted(held) == driver.keys()
    fits = {key: row for key, row in source.rows.items() if row[PRICE] != NAN}
    assert held == {key: row for key, row in source.rows.items() if key not in fits}
    target = {key: row for key, row in driver.rows().items() if key not in held}
    assert target == {key: (row[ITEM], row[PRICE]) for key, row in fits.items()}


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 30))])
def test_after_any_batches_and_crashes_every_key_is_as_the_source_has_it_or_parked(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    source, driver = Source(random), Driver(tmp_path)
    for _ in range(12):
        for _ in range(random.randint(1, 5)):
            source.change()
        if random.random() < 0.4:
            driver = crashed(driver, source, tmp_path, source.position - random.choice((0, 0, 1)))
            assert all(held.image for held in driver.quarantine.rows)
        for held in driver.quarantine.rows:
            if not held.complete and random.random() < 0.5:
                source.read(held.key[0])
        driven(driver, source, source.position)
    while asked := [held.key[0] for held in driver.quarantine.rows if not held.complete]:
        for key in asked:
            source.read(key)
        driven(driver, source, source.position)

    expect_true(driver, source)
    driver.sink.close()
    again = Driver(tmp_path)
    expect_true(again, source)
    assert again.sink.open("log-1") == Published(source.position, 0, again.tables)
