"""Tables without a key, compacted: the same multiset for everybody who may read it, and no more than is alive."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from cdc.change import LOG_SCHEMA
from cdc.log import consumers
from cdc.log.audit.verify import verify
from cdc.log.compacted_state import read_compacted_state
from cdc.log.consumers import Consumer
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.position import Position
from pipelines.compaction.compact import CompactionLimits, compact
from pipelines.compaction.keyless_netting import CANCELLED, without_cancelled
from pipelines.folding.fold import fold
from tests.fixtures.examples import examples
from tests.log.rows import info, row, schema_of, table
from tests.pipelines.cold_log import log_writer
from tests.pipelines.compaction.test_compact import trim

BAG = 16390
Image = tuple[tuple[int, str | None], ...]
START = Position(0)


@dataclass
class Bag:
    """A table without a key whose equal rows come and go, and what that leaves in the log."""

    random: Random
    values: tuple[str | None, ...] = ("a", "b", "", None)
    rows: list[Image] = field(default_factory=list)
    truncates: float = 0.02
    position: int = 8
    history: dict[int, Counter[Image]] = field(default_factory=dict)
    """Position → the table there."""

    def begin(self) -> list[dict[str, Any]]:
        """The table's version."""
        made = schema_of(BAG, "note", "more")
        columns = tuple(replace(column, key=None) for column in made.columns)
        schema = replace(made, name="bag", columns=columns)
        return [self._row(0, "s", payload=schema.to_json())]

    def transaction(self) -> list[dict[str, Any]]:
        """One to four changes at the next position."""
        self.position += 8
        made = [self._change(ordinal) for ordinal in range(self.random.randint(1, 4))]
        self.history[self.position] = Counter(self.rows)
        return made

    def several(self, count: int) -> list[dict[str, Any]]:
        """Transactions for one commit."""
        return [change for _ in range(count) for change in self.transaction()]

    def _change(self, ordinal: int) -> dict[str, Any]:
        what = self.random.random()
        if what < self.truncates:
            self.rows.clear()
            return self._row(ordinal, "t")
        if what < 0.45 or not self.rows:
            self.rows.append(self._image())
            return self._row(ordinal, "c", after=self.rows[-1])
        before = self.rows.pop(self.random.randrange(len(self.rows)))
        if what < 0.75:
            return self._row(ordinal, "d", before=before)
        self.rows.append(self._image())
        return self._row(ordinal, "u", before=before, after=self.rows[-1])

    def _image(self) -> Image:
        width = self.random.choice([2, 3])  # as rows are that are older than a column
        return tuple((n, self.random.choice(self.values)) for n in range(1, width + 1))

    def told(self, position: int, op: str, **fields: Any) -> dict[str, Any]:
        """A change alone in its transaction."""
        return self._row(0, op, **fields) | {"position": position}

    def _row(self, ordinal: int, op: str, **fields: Any) -> dict[str, Any]:
        said = {name: list(image) if isinstance(image, tuple) else image for name, image in fields.items()}
        place = {"relation": BAG, "topic": "shop.bag", "key": None, "after": None}
        return row(self.position, ordinal, **(place | said), op=op)


def multiset(root: Path, after: Position = START, held: Counter[Image] | None = None) -> Counter[Image]:
    """What somebody holds who reads the log on from a position."""
    log = LogReader(root)
    rows = fold(pa.Table.from_batches(log.rows(after, log.durable or START), LOG_SCHEMA), sink="any")
    found = Counter() if held is None or "t" in rows["op"].to_pylist() else Counter(held)
    for change in rows.to_pylist():
        if change["op"] in {"u", "d"}:
            found[tuple(change["after"])] += 1 if change["op"] == "u" else -1
    return Counter({image: count for image, count in found.items() if count})


def append(writer: LogWriter, rows: list[dict[str, Any]]) -> None:
    writer.commit(writer.stage(table(*rows)), info(rows[-1]["position"]))


@examples(2)
@given(seed=st.integers(0, 2**32 - 1))
def test_whoever_begins_or_goes_on_comes_to_the_rows_of_the_source(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    root, random = tmp_path_factory.mktemp("bag"), Random(seed)
    bag, writer = Bag(random), log_writer(root)
    append(writer, bag.begin())
    reader = START
    for _ in range(8):
        append(writer, bag.several(8))
        if random.random() < 0.5:
            reader = Position(random.choice([at for at in bag.history if at >= reader]))
            consumers.register(root, Consumer("a", "slow", reader))
            limits = CompactionLimits(parts=random.choice([1, 3]), most=random.choice([5, 10**6]))
            compact(None, root, everything=True, limits=limits)
            trim(writer, root)
            right = bag.history[bag.position]
            assert multiset(root) == right
            assert multiset(root, reader, bag.history.get(reader)) == right
    assert verify(root).is_sound


def churned(root: Path, rounds: int, **limits: Any) -> tuple[Bag, int]:
    """A log in which few rows live and many have, and how many rows its compacted part has."""
    bag, writer = Bag(Random(7), values=("a",)), log_writer(root)
    append(writer, bag.begin())
    for _ in range(rounds):
        append(writer, bag.several(12))
        consumers.register(root, Consumer("a", "lake", Position(bag.position)))
        compact(limits.get("spark"), root, everything=True, limits=CompactionLimits(parts=limits.get("parts")))
    held = read_compacted_state(root)
    assert held is not None
    return bag, sum(run.rows for run in held.runs)


@pytest.mark.parametrize("parts", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_that_came_and_went_are_not_kept(tmp_path: Path, parts: int) -> None:
    bag, kept = churned(tmp_path, 10, parts=parts)
    assert multiset(tmp_path) == bag.history[bag.position]
    assert kept < 60  # of some 300 that were written: those alive, and those since the last merge


@pytest.mark.slow
def test_workers_keep_them_as_little(tmp_path: Path, spark: SparkSession) -> None:
    bag, kept = churned(tmp_path, 12, parts=3, spark=spark)
    assert multiset(tmp_path) == bag.history[bag.position]
    assert kept < 60


def test_what_a_truncate_ended_cancels_nothing_behind_it(tmp_path: Path) -> None:
    bag, writer = Bag(Random(1)), log_writer(tmp_path)
    append(writer, bag.begin())
    image, other = [(1, "a")], bag.random.randbytes(20_000).hex()  # so much that the runs are merged
    append(writer, [bag.told(16, "c", after=image)])
    compact(None, tmp_path, everything=True)
    append(writer, [bag.told(24, "t"), bag.told(32, "c", after=image), bag.told(40, "d", before=image)])
    append(writer, [bag.told(48, "c", after=[(1, other)])])
    consumers.register(tmp_path, Consumer("a", "lake", Position(40)))
    assert compact(None, tmp_path, everything=True).merged == 2
    append(writer, [bag.told(56, "c", after=[(1, "b")])])
    trim(writer, tmp_path)

    assert LogReader(tmp_path).oldest == 48
    assert multiset(tmp_path) == {((1, other),): 1, ((1, "b"),): 1}


def test_without_a_reader_that_has_passed_nothing_cancels(tmp_path: Path) -> None:
    bag, writer = Bag(Random(3), truncates=0.0), log_writer(tmp_path)
    append(writer, bag.begin())
    written = 0
    for _ in range(5):
        rows = bag.several(4)
        written += len(rows)
        append(writer, rows)
        compact(None, tmp_path, everything=True)
    held = read_compacted_state(tmp_path)
    assert held is not None
    assert sum(run.rows for run in held.runs) == written + 1


def test_an_update_of_which_one_half_is_left_is_what_that_half_is() -> None:
    old, new = [(1, "old")], [(1, "new")]
    rows = table(
        *(row(8, n, key=None, op=op, before=before, after=after) for n, (op, before, after) in enumerate((
            ("u", old, new), ("u", old, new), ("u", old, new), ("u", old, new), ("c", None, new), ("d", old, None),
        )))
    )  # fmt: skip
    halves = [(8, 1, True), (8, 2, False), (8, 3, True), (8, 3, False), (8, 4, True)]
    found = pa.table(list(zip(*halves, strict=True)), schema=CANCELLED)
    left = [(r["ordinal"], r["op"], r["before"], r["after"]) for r in without_cancelled(rows, found).to_pylist()]
    assert left == [(0, "u", old, new), (1, "d", old, None), (2, "c", None, new), (5, "d", old, None)]
