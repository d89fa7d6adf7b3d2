"""Events of windows: log order over all tables, schemas in force, and reading ahead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cdc.delivery.destinations.contract import Event
from cdc.delivery.event_source import EventWindow
from cdc.delivery.progress import Progress
from cdc.errors import LogError
from cdc.log.reader import LogReader
from cdc.position import Position
from tests.delivery.destinations.planned import PlannedDestination
from tests.delivery.loop_run import LoopRun, places_of
from tests.delivery.sent_log import (
    ONE_SEGMENT,
    all_places,
    begin_log,
    change,
    commit_in_groups,
    random_transactions,
    rewrite_small_files,
    schema_version,
)
from tests.log.file_damage import damage_column
from tests.log.sample_log import ITEMS, ORDERS, commit_rows, schema_row


def windows(run: LoopRun, progress: Progress | None = None) -> Iterator[EventWindow]:
    """The windows after a progress, as the loop reads them."""
    progress = progress or Progress(log_id=run.log.log_id)
    while (window := run.source.next(progress)) is not None:
        yield window
        progress = Progress(log_id=run.log.log_id, position=window.upto, bootstrap=window.window.bootstrap)


def events_of(run: LoopRun) -> list[Event]:
    """All events of a log."""
    return [event for window in windows(run) for part in window.parts for event in part.encoded.events]


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    return tmp_path / "log"


def run_over(root: Path, **fields: Any) -> LoopRun:
    """A source over the log."""
    return LoopRun(root, PlannedDestination(), **fields)


def test_events_of_all_tables_are_in_log_order_and_have_stable_ids(root: Path):
    random = Random(3)
    commit_in_groups(begin_log(root, ONE_SEGMENT), random_transactions(random, 20, 15, most=9), random)
    before = events_of(run_over(root, batch=10_000))
    assert rewrite_small_files(root)

    for batch in (1, 3, 10, 10_000):
        assert events_of(run_over(root, batch=batch)) == before
    assert places_of(before) == [place for place in all_places(LogReader(root)) if place[0] > 10]
    assert before[0].id == f"{LogReader(root).log_id}/{Position(before[0].position)}/{before[0].ordinal}"
    assert dict(before[0].headers) == {"cdc.id": before[0].id.encode(), "cdc.position": b"0/14", "cdc.xid": b"1"}


def test_a_change_has_the_columns_of_the_schema_in_force_at_its_place(root: Path):
    writer = begin_log(root)
    after = [(1, "1"), (2, "a"), (3, "b")]
    commit_rows(
        writer,
        change(ORDERS, 20, 0, "1"),
        schema_row(20, 1, schema_version(ORDERS, "name", "note")),
        change(ITEMS, 20, 2, "1"),
        change(ORDERS, 20, 3, "1", after=after),
        schema_row(20, 4, schema_version(ORDERS, "title", "note", name="sales")),
        change(ORDERS, 20, 5, "1", after=after, topic="shop.sales"),
    )
    commit_rows(writer, change(ORDERS, 30, 0, "1", after=after, topic="shop.sales"))

    found = events_of(run_over(root, batch=2))

    assert [(event.topic, json.loads(event.value or b"")[2]) for event in found] == [
        ("shop.shop.orders", {"id": "1", "name": "20.0"}),
        ("shop.shop.items", {"id": "1", "name": "20.2"}),
        ("shop.shop.orders", {"id": "1", "name": "a", "note": "b"}),
        ("shop.shop.sales", {"id": "1", "title": "a", "note": "b"}),
        ("shop.shop.sales", {"id": "1", "title": "a", "note": "b"}),
    ]


def test_the_parts_of_a_large_transaction_can_be_read_again_and_adopt_its_schemas_each_time(root: Path):
    writer = begin_log(root)
    rows = [change(ORDERS, 20, n, str(n)) for n in range(5)]
    later = [change(ORDERS, 20, n, str(n), after=[(1, str(n)), (2, "x"), (3, "y")]) for n in range(6, 11)]
    commit_rows(writer, *rows, schema_row(20, 5, schema_version(ORDERS, "name", "note")), *later)
    commit_rows(writer, change(ORDERS, 30, 0, "1", after=[(1, "1"), (2, "x"), (3, "y")]))
    run = run_over(root, batch=3)

    *_, large, last = windows(run)

    first, second = ([event for part in large.parts for event in part.encoded.events] for _ in range(2))
    assert first == second
    assert [len(json.loads(event.value or b"")[2]) for event in first] == [2] * 5 + [3] * 5
    assert [len(json.loads(event.value or b"")[2]) for part in last.parts for event in part.encoded.events] == [3]


def test_a_window_that_was_read_ahead_is_not_used_after_a_rewind(root: Path):
    random = Random(4)
    commit_in_groups(begin_log(root), random_transactions(random, 20, 15, most=3), random)
    run = run_over(root, batch=4)
    expected = events_of(run_over(root, batch=4))
    found = windows(run)
    for _ in range(4):
        next(found)

    again = [event for window in windows(run) for part in window.parts for event in part.encoded.events]

    assert again == expected


def test_a_window_that_could_not_be_read_ahead_is_read_again(root: Path):
    writer = begin_log(root)
    for position in (20, 30, 40, 50):  # so large that each is read alone
        wide = Random(position).randbytes(8 << 20).hex()
        commit_rows(writer, change(ORDERS, position, 0, "1", after=[(1, "1"), (2, wide)]))
    run, expected = run_over(root), events_of(run_over(root))
    file = next(Path(one.path) for one in run.log.every_file() if one.first == 40)
    content = file.read_bytes()
    damage_column(file, "after")
    found = windows(run)
    read = list(islice(found, 3))

    with pytest.raises(LogError):
        next(found)
    file.write_bytes(content)
    read += windows(run, Progress(log_id=run.log.log_id, position=read[-1].upto))

    assert [event for window in read for part in window.parts for event in part.encoded.events] == expected


def test_a_window_has_the_commit_time_of_its_last_transaction(root: Path):
    writer = begin_log(root)
    commit_rows(writer, change(ORDERS, 20, 0, "1"))

    *_, last = windows(run_over(root))

    assert last.committed_at == 20  # as commit_rows says
