"""Trimmer: a log is trimmed by itself while its reader runs, and never behind a copy's back."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, get_native_id
from typing import Any

import pytest

from cdc.log.consumers import FOLDER, Consumer, register
from cdc.log.maintenance_worker import NICE_INCREMENT, RetentionWorker
from cdc.log.reader import LogReader
from cdc.log.retired_files import list_removals
from cdc.log.small_file_rewrite import CLOSED_MIN_SAVING
from cdc.log.trim_plan import REQUEST_FILE, Retention, TrimPlan, plan_trim, request_trim
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from cdc.table import TableState
from tests.fixtures.waiting import until
from tests.log.rows import IDENTITY, info, row, schema_of, table
from tests.log.simple_compaction import compact

KEPT = Retention(max_age=1e9, grace=0.0)


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> LogWriter:
    """Of a log with segments 0 to 3 at 10 to 40; one sink has come to 30."""
    writer = LogWriter.open(tmp_path, IDENTITY, SegmentLimits(size=1, age=3600.0))
    for position in (10, 20, 30, 40):
        writer.commit(writer.stage(table(row(position))), info(position))
    register(tmp_path, Consumer("c", "lake", Position(30)))
    return writer


def test_nothing_is_due_before_the_log_is_compacted(writer: LogWriter, tmp_path: Path):
    assert plan_trim(tmp_path, KEPT) is None
    compact(tmp_path, 20)
    assert plan_trim(tmp_path, KEPT) == TrimPlan((0, 1), Position(20))
    writer.trim([0, 1], Position(20))
    assert plan_trim(tmp_path, KEPT) is None


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({25: TableState.SNAPSHOTTING}, TrimPlan((0, 1, 2), Position(25))),
        ({25: TableState.SNAPSHOTTING, 35: TableState.SNAPSHOTTING}, TrimPlan((0, 1, 2), Position(25))),
        ({25: TableState.SNAPSHOTTING, 35: TableState.LIVE}, TrimPlan((0, 1, 2, 3, 4), Position(35))),
        (
            {15: TableState.LIVE, 5: TableState.SNAPSHOTTING, 35: TableState.SNAPSHOTTING},
            TrimPlan((0, 1, 2, 3, 4, 5), Position(35)),
        ),
        ({8: TableState.SNAPSHOTTING, 5: TableState.LIVE}, TrimPlan((0, 1), Position(8))),
        ({5: TableState.SNAPSHOTTING}, TrimPlan((0,), Position(5))),
    ],
)
def test_a_copy_that_has_not_ended_keeps_what_came_since_it_began(
    tmp_path: Path, states: dict[int, TableState], expected: TrimPlan
):
    writer = LogWriter.open(tmp_path, IDENTITY, SegmentLimits(size=1, age=3600.0))
    said = {position: said_at(position, state) for position, state in states.items()}
    for position in sorted({10, 20, 30, 40, 50} | set(states)):
        writer.commit(writer.stage(table(said.get(position, row(position)))), info(position))
    register(tmp_path, Consumer("c", "lake", Position(35)))
    compact(tmp_path, 40)
    assert plan_trim(tmp_path, KEPT) == expected


def said_at(position: int, state: TableState) -> dict[str, Any]:
    return row(position, op="s", key=None, payload=replace(schema_of(), state=state).to_json())


@pytest.fixture(name="woken")
def _woken() -> Event:
    return Event()


@pytest.fixture(name="trimmer")
def _trimmer(tmp_path: Path, woken: Event) -> Iterator[RetentionWorker]:
    with RetentionWorker(tmp_path, KEPT, woken.set) as trimmer:
        yield trimmer


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only a process has a priority")
@pytest.mark.usefixtures("writer")
def test_the_thread_has_a_lower_priority_than_the_stream(tmp_path: Path, woken: Event) -> None:
    own, found = os.getpriority(os.PRIO_PROCESS, 0), list[int]()

    def wake() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, get_native_id()))
        woken.set()

    compact(tmp_path, 40)
    request_trim(tmp_path)
    with RetentionWorker(tmp_path, KEPT, wake):
        assert woken.wait(60)
    assert found[0] == min(19, own + NICE_INCREMENT)


def test_the_committing_thread_is_woken_and_trims(
    writer: LogWriter, tmp_path: Path, trimmer: RetentionWorker, woken: Event
):
    assert trimmer.commit_prepared(writer) is None
    compact(tmp_path, 40)
    request_trim(tmp_path)
    assert woken.wait(60)
    assert trimmer.commit_prepared(writer) == TrimPlan((0, 1, 2), Position(30))
    assert trimmer.commit_prepared(writer) is None
    assert LogReader(tmp_path).oldest == 30


@pytest.mark.usefixtures("writer")
def test_what_is_asked_for_is_done_at_once(tmp_path: Path, trimmer: RetentionWorker):
    assert trimmer is not None
    until(lambda: not (tmp_path / REQUEST_FILE).exists(), "the first look")
    request_trim(tmp_path)
    until(lambda: not (tmp_path / REQUEST_FILE).exists(), "the look that was asked for")


def test_a_look_that_fails_is_made_again(writer: LogWriter, tmp_path: Path, trimmer: RetentionWorker, woken: Event):
    compact(tmp_path, 40)
    broken = tmp_path / FOLDER / "d.json"
    broken.write_text("{")
    request_trim(tmp_path)
    until(lambda: not (tmp_path / REQUEST_FILE).exists(), "the look that fails")
    broken.unlink()
    request_trim(tmp_path)
    assert woken.wait(60)
    assert trimmer.commit_prepared(writer) is not None


def test_what_is_settled_is_found_beside_and_put_in_place_by_who_commits(tmp_path: Path, woken: Event):
    writer = LogWriter.open(tmp_path, IDENTITY, SegmentLimits(size=1 << 20, age=3600.0))
    for position in range(10, 12 + CLOSED_MIN_SAVING):
        writer.commit(writer.stage(table(row(position))), info(position))
    later = LogWriter(tmp_path, SegmentLimits(size=1, age=3600.0))
    later.commit(later.stage(table(row(90))), info(90))
    with RetentionWorker(tmp_path, KEPT, woken.set) as trimmer:
        assert woken.wait(60)
        trimmer.commit_prepared(later)
        assert len(LogReader(tmp_path).every_file()) == 2
        later.commit([], info(100))
        request_trim(tmp_path)
        until(lambda: not list_removals(tmp_path), "the old files gone")


def test_a_trim_that_is_no_more_possible_is_told_and_stops_nothing(
    writer: LogWriter, tmp_path: Path, trimmer: RetentionWorker, woken: Event
):
    compact(tmp_path, 40)
    request_trim(tmp_path)
    assert woken.wait(60)
    (tmp_path / "compacted").rename(tmp_path / "elsewhere")
    assert trimmer.commit_prepared(writer) is None
    writer.commit([], info(50))


def test_without_a_retention_nothing_is_looked_at(tmp_path: Path, woken: Event):
    request_trim(tmp_path)
    with RetentionWorker(tmp_path, None, woken.set):
        pass
    assert (tmp_path / REQUEST_FILE).exists()
