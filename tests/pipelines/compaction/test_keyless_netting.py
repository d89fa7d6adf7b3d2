"""Netting of tables without a key: every reader gets the right multiset, and cancelled rows leave the log."""

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

from cdc.log import consumers
from cdc.log.audit.verify import verify
from cdc.log.compacted_table import read_compacted_state
from cdc.log.consumers import Consumer
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.compaction.compaction_steps import CompactionLimits, compact
from pipelines.compaction.keyless_netting import CANCELLED_SCHEMA, remove_cancelled_halves
from pipelines.folding.fold import fold
from tests.fixtures.examples import examples
from tests.log.rows import info, row, schema_of, table
from tests.pipelines.cold_log import log_writer
from tests.pipelines.compaction.test_compaction_steps import trim

BAG = 16390
Image = tuple[tuple[int, str | None], ...]
START = Position(0)


@dataclass
class Bag:
    """A table without a key whose equal rows are added and removed, and its log rows."""

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

    def change_at(self, position: int, op: str, **fields: Any) -> dict[str, Any]:
        """A change alone in its transaction."""
        return self._row(0, op, **fields) | {"position": position}

    def _row(self, ordinal: int, op: str, **fields: Any) -> dict[str, Any]:
        values = {name: list(image) if isinstance(image, tuple) else image for name, image in fields.items()}
        place = {"relation": BAG, "topic": "shop.bag", "key": None, "after": None}
        return row(self.position, ordinal, **(place | values), op=op)


def multiset(root: Path, after: Position = START, before: Counter[Image] | None = None) -> Counter[Image]:
    """The rows of a reader that continues from a position with the rows `before`."""
    log = LogReader(root)
    rows = fold(pa.Table.from_batches(log.rows(after, log.durable or START), LOG_SCHEMA), sink="any")
    found = Counter() if before is None or "t" in rows["op"].to_pylist() else Counter(before)
    for change in rows.to_pylist():
        if change["op"] in {"u", "d"}:
            found[tuple(change["after"])] += 1 if change["op"] == "u" else -1
    return Counter({image: count for image, count in found.items() if count})


def append(writer: LogWriter, rows: list[dict[str, Any]]) -> None:
    writer.commit(writer.stage(table(*rows)), info(rows[-1]["position"]))


@examples(2)
@given(seed=st.integers(0, 2**32 - 1))
def test_new_and_late_readers_get_the_rows_of_the_source(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    root, random = tmp_path_factory.mktemp("bag"), Random(seed)
    bag, writer = Bag(random), log_writer(root)
    append(writer, bag.begin())
    reader = START
    for _ in range(6):
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


def log_with_few_live_rows(root: Path, rounds: int, **limits: Any) -> tuple[Bag, int]:
    """(table with few rows after many changes, number of compacted rows)."""
    bag, writer = Bag(Random(7), values=("a",)), log_writer(root)
    append(writer, bag.begin())
    for _ in range(rounds):
        append(writer, bag.several(12))
        consumers.register(root, Consumer("a", "lake", Position(bag.position)))
        compact(limits.get("spark"), root, everything=True, limits=CompactionLimits(parts=limits.get("parts")))
    state = read_compacted_state(root)
    assert state is not None
    return bag, sum(run.rows for run in state.runs)


@pytest.mark.parametrize("parts", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_cancelled_rows_leave_the_log(tmp_path: Path, parts: int) -> None:
    bag, kept = log_with_few_live_rows(tmp_path, 10, parts=parts)
    assert multiset(tmp_path) == bag.history[bag.position]
    assert kept < 60  # of some 300 that were written: those alive, and those since the last merge


@pytest.mark.slow
def test_workers_remove_cancelled_rows(tmp_path: Path, spark: SparkSession) -> None:
    bag, kept = log_with_few_live_rows(tmp_path, 12, parts=3, spark=spark)
    assert multiset(tmp_path) == bag.history[bag.position]
    assert kept < 60


def test_a_row_before_a_truncate_cancels_no_later_row(tmp_path: Path) -> None:
    bag, writer = Bag(Random(1)), log_writer(tmp_path)
    append(writer, bag.begin())
    image, other = [(1, "a")], bag.random.randbytes(20_000).hex()  # so much that the runs are merged
    append(writer, [bag.change_at(16, "c", after=image)])
    compact(None, tmp_path, everything=True)
    append(writer, [bag.change_at(24, "t"), bag.change_at(32, "c", after=image), bag.change_at(40, "d", before=image)])
    append(writer, [bag.change_at(48, "c", after=[(1, other)])])
    consumers.register(tmp_path, Consumer("a", "lake", Position(40)))
    assert compact(None, tmp_path, everything=True).merged == 2
    append(writer, [bag.change_at(56, "c", after=[(1, "b")])])
    trim(writer, tmp_path)

    assert LogReader(tmp_path).oldest == 48
    assert multiset(tmp_path) == {((1, other),): 1, ((1, "b"),): 1}


def test_without_a_consumer_nothing_cancels(tmp_path: Path) -> None:
    bag, writer = Bag(Random(3), truncates=0.0), log_writer(tmp_path)
    append(writer, bag.begin())
    written = 0
    for _ in range(5):
        rows = bag.several(4)
        written += len(rows)
        append(writer, rows)
        compact(None, tmp_path, everything=True)
    state = read_compacted_state(tmp_path)
    assert state is not None
    assert sum(run.rows for run in state.runs) == written + 1


def test_an_update_with_one_half_left_becomes_an_insert_or_a_delete() -> None:
    old, new = [(1, "old")], [(1, "new")]
    rows = table(
        *(row(8, n, key=None, op=op, before=before, after=after) for n, (op, before, after) in enumerate((
            ("u", old, new), ("u", old, new), ("u", old, new), ("u", old, new), ("c", None, new), ("d", old, None),
        )))
    )  # fmt: skip
    halves = [(8, 1, True), (8, 2, False), (8, 3, True), (8, 3, False), (8, 4, True)]
    found = pa.table(list(zip(*halves, strict=True)), schema=CANCELLED_SCHEMA)
    left = [(r["ordinal"], r["op"], r["before"], r["after"]) for r in remove_cancelled_halves(rows, found).to_pylist()]
    assert left == [(0, "u", old, new), (1, "d", old, None), (2, "c", None, new), (5, "d", old, None)]
