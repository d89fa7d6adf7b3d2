"""Logs for tests of deliveries, and what a delivery reads from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from cdc.delivery.log_windows import LogWindow, next_window
from cdc.log.reader import LogReader
from cdc.log.small_file_rewrite import plan_rewrite, rewrite_files
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from cdc.table import TableSchema
from tests.log.rows import IDENTITY, row, schema_of
from tests.log.sample_log import ITEMS, ORDERS, commit_rows, schema_row

SEGMENT_PER_COMMIT = SegmentLimits(size=1, age=3600.0)
ONE_SEGMENT = SegmentLimits(size=1 << 28, age=3600.0)
Row = dict[str, Any]
Place = tuple[int, int]


def schema_version(relation: int, *columns: str, name: str = "") -> TableSchema:
    """A version of `shop.orders` or `shop.items`."""
    return replace(schema_of(relation, *columns), name=name or {ORDERS: "orders", ITEMS: "items"}[relation])


def change(relation: int, position: int, ordinal: int, number: str, **fields: Any) -> Row:
    """An insert of one key into one of the tables, with fields replaced."""
    topic = {ORDERS: "shop.orders", ITEMS: "shop.items"}[relation]
    content = {"topic": topic, "key": [number], "after": [(1, number), (2, f"{position}.{ordinal}")]}
    return row(position, ordinal, relation=relation, **(content | fields))


def begin_log(root: Path, limits: SegmentLimits = SEGMENT_PER_COMMIT) -> LogWriter:
    """A log with the schemas of both tables at position 10."""
    writer = LogWriter.open(root, IDENTITY, limits)
    commit_rows(
        writer,
        schema_row(10, 0, schema_version(ORDERS, "name")),
        schema_row(10, 1, schema_version(ITEMS, "name")),
    )
    return writer


def random_transactions(random: Random, first: int, number: int, most: int) -> Iterator[list[Row]]:
    """Transactions of up to `most` rows of both tables; some ordinals are missing, as those of removed rows are."""
    for position in range(first, first + number * 10, 10):
        rows: list[Row] = []
        ordinal = 0
        for _ in range(random.randint(1, most)):
            relation, key = random.choice((ORDERS, ITEMS)), str(random.randint(1, 8))
            rows.append(change(relation, position, ordinal, key))
            ordinal += random.choice((1, 1, 1, 50))
        yield rows


def commit_in_groups(writer: LogWriter, transactions: Iterable[list[Row]], random: Random) -> None:
    """Commit the transactions, one to four per file."""
    waiting: list[Row] = []
    left = random.randint(1, 4)
    for rows in transactions:
        waiting += rows
        left -= 1
        if not left:
            commit_rows(writer, *waiting)
            waiting, left = [], random.randint(1, 4)
    if waiting:
        commit_rows(writer, *waiting)


def random_log(root: Path) -> Path:
    """Write a log of twenty random transactions, each time the same, and return its directory."""
    random = Random(5)
    commit_in_groups(begin_log(root), random_transactions(random, 20, 20, most=6), random)
    return root


def rewrite_small_files(root: Path) -> bool:
    """Replace small files by files that are sorted by table; return whether there were any."""
    job = plan_rewrite(LogReader(root).every_file(), min_open=1)
    found = None if job is None else rewrite_files(root, job, lambda: False)
    return found is not None and LogWriter(root, SEGMENT_PER_COMMIT).rewrite(found.new, found.old)


def places(window: LogWindow) -> list[Place]:
    """Position and ordinal of each row of a window, in the order of its parts."""
    return [
        place
        for part in window.tables()
        for place in zip(part["position"].to_pylist(), part["ordinal"].to_pylist(), strict=True)
    ]


def all_places(log: LogReader) -> list[Place]:
    """Position and ordinal of every row of `changes`, in order."""
    durable = log.durable or Position(0)
    found = (batch.to_pylist() for batch in log.rows(log.oldest, durable))
    return sorted((one["position"], one["ordinal"]) for batch in found for one in batch)


def expected(root: Path) -> list[Place]:
    """Position and ordinal of every event of the log: all rows without the two schemas."""
    return [place for place in all_places(LogReader(root)) if place[0] > 10]


def windows(root: Path, sizes: Iterable[int]) -> Iterator[LogWindow]:
    """Every window from the beginning, each read by a process that has just started, as after a crash."""
    after, bootstrap = Position(0), None
    for most in sizes:
        window = next_window(LogReader(root), after, bootstrap, most)
        if window is None:
            return
        yield window
        after, bootstrap = window.upto, window.bootstrap


def fold(rows: Iterable[Row], state: dict[tuple[int, str], dict[int, str | None]]) -> None:
    """Apply rows to a state as a consumer of events does: an unsent column keeps its value."""
    for one in rows:
        if one["key"] is None:
            continue
        place = one["relation"], one["key"][0]
        if one["op"] == "d":
            state.pop(place, None)
        else:
            state[place] = {**state.get(place, {}), **dict(one["after"])}
