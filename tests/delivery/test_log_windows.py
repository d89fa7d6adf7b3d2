"""Windows of the log: every row of the log once and in order, whole transactions, and the compacted state resumed."""

from __future__ import annotations

from itertools import chain, groupby, pairwise, repeat
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from cdc.delivery.log_windows import LogWindow, LogWindows, next_window
from cdc.errors import LogTrimmed
from cdc.log.file_selection import EVERY_ROW
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from tests.delivery.sent_log import (
    ONE_SEGMENT,
    SEGMENT_PER_COMMIT,
    Row,
    all_places,
    begin_log,
    change,
    commit_in_groups,
    fold,
    places,
    random_transactions,
    rewrite_small_files,
    windows,
)
from tests.fixtures.examples import examples
from tests.log import simple_compaction
from tests.log.sample_log import ITEMS, ORDERS, build_sample_log, commit_rows

QUIET = examples(6, suppress_health_check=[HealthCheck.function_scoped_fixture])
START = Position(0)


@QUIET
@given(seed=st.integers(0, 10**6), most=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_windows_of_any_size_have_every_row_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, seed: int, most: list[int]
):
    random, root = Random(seed), tmp_path_factory.mktemp("log") / "log"
    limits = random.choice((ONE_SEGMENT, SEGMENT_PER_COMMIT))
    commit_in_groups(begin_log(root, limits), random_transactions(random, 20, 12, most=9), random)
    if random.random() < 0.7:
        rewrite_small_files(root)

    found = list(windows(root, chain(most, repeat(most[-1]))))

    assert [place for window in found for place in places(window)] == all_places(LogReader(root))
    assert all(before.upto == after.after for before, after in pairwise(found))
    assert [window.is_last for window in found] == [*[False] * (len(found) - 1), True]
    for window, size in zip(found, chain(most, repeat(most[-1])), strict=False):
        positions = {position for position, _ in places(window)}
        assert len(places(window)) <= size or len(positions) == 1
        assert all(part.num_rows <= size for part in window.tables())


@QUIET
@given(
    seed=st.integers(0, 10**6),
    at_once=st.integers(1, 40),
    most=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    is_trimmed=st.booleans(),
)
def test_windows_of_rows_that_were_read_together_have_every_row_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, seed: int, at_once: int, most: list[int], is_trimmed: bool
):
    random, root = Random(seed), tmp_path_factory.mktemp("log") / "log"
    if is_trimmed:
        CompactedLog(root)
    else:
        commit_in_groups(begin_log(root, SEGMENT_PER_COMMIT), random_transactions(random, 20, 12, most=9), random)
    log = LogReader(root)
    expected = [place for window in windows(root, repeat(1000)) for place in places(window)]
    reader, after, bootstrap, found = LogWindows(log, EVERY_ROW, at_once), START, None, list[LogWindow]()

    for size in chain(most, repeat(most[-1])):
        if random.random() < 0.2:  # as after a crash
            reader = LogWindows(LogReader(root), EVERY_ROW, at_once)
        if (window := reader.next(after, bootstrap, size)) is None:
            break
        assert len(places(window)) <= size or len({position for position, _ in places(window)}) == 1
        assert window.is_large == (len(places(window)) > size)
        assert all(part.num_rows <= size for part in window.tables())
        found.append(window)
        after, bootstrap = window.upto, window.bootstrap

    assert [place for window in found for place in places(window)] == expected
    assert all(before.upto == one.after for before, one in pairwise(found))
    assert found[-1].is_last
    assert not any(window.is_last for window in found[:-1])
    assert found[-1].upto == log.durable


def test_a_caller_that_continues_elsewhere_gets_the_window_from_there(tmp_path: Path):
    writer = begin_log(tmp_path)
    for position in (20, 30, 40, 50):
        commit_rows(writer, change(ORDERS, position, 0, "1"))
    reader = LogWindows(LogReader(tmp_path), EVERY_ROW)
    first = reader.next(START, None, 2)
    assert first is not None

    again, later = reader.next(START, None, 2), reader.next(Position(40), None, 2)

    assert again is not None
    assert places(again) == places(first)
    assert later is not None
    assert places(later) == [(50, 0)]


def test_a_file_that_is_sorted_by_table_is_read_in_log_order(tmp_path: Path):
    writer = begin_log(tmp_path, ONE_SEGMENT)
    for position in range(20, 220, 20):
        commit_rows(writer, *(change((ORDERS, ITEMS)[n % 2], position + n // 4, n % 4, str(n)) for n in range(8)))
    commit_rows(writer, change(ORDERS, 300, 0, "1"))
    before = all_places(LogReader(tmp_path))

    assert rewrite_small_files(tmp_path)
    found = [place for window in windows(tmp_path, repeat(5)) for place in places(window)]

    assert found == before


def test_a_transaction_that_is_larger_than_a_window_is_read_in_parts_of_this_size(tmp_path: Path):
    writer = begin_log(tmp_path)
    commit_rows(writer, change(ORDERS, 20, 0, "1"), *(change(ORDERS, 30, n * 7, str(n)) for n in range(25)))

    window = next_window(LogReader(tmp_path), Position(20), None, 10)

    assert window is not None
    assert window.upto == Position(30)
    assert [part.num_rows for part in window.tables()] == [10, 10, 5]
    assert places(window) == [(30, n * 7) for n in range(25)]


def test_wide_rows_make_a_window_smaller(tmp_path: Path):
    writer, random = begin_log(tmp_path), Random(1)
    for position in range(20, 28):
        wide = random.randbytes(2 << 20).hex()
        commit_rows(writer, change(ORDERS, position, 0, "1", after=[(1, "1"), (2, wide)]))

    found = list(windows(tmp_path, repeat(10_000)))

    assert [place for window in found for place in places(window)] == all_places(LogReader(tmp_path))
    assert max(len(places(window)) for window in found) < 8


def test_nothing_new_has_no_window(tmp_path: Path):
    begin_log(tmp_path)

    assert next_window(LogReader(tmp_path), Position(10), None, 10) is None
    assert next_window(LogReader(tmp_path), Position(99), None, 10) is None


def test_the_state_is_complete_after_a_compaction_and_each_row_has_its_schema_before_it(tmp_path: Path):
    build_sample_log(tmp_path)
    log = LogReader(tmp_path)

    found = list(windows(tmp_path, repeat(3)))

    known: set[int] = set()
    for one in chain.from_iterable(map(rows_of, found)):
        if one["op"] == "s":
            known.add(one["relation"])
        else:
            assert one["relation"] is None or one["relation"] in known
    assert found[-1].upto == log.durable
    assert found[0].bootstrap is not None
    assert found[-1].bootstrap is None


def rows_of(window: LogWindow) -> list[Row]:
    """The rows of a window."""
    return [one for part in window.tables() for one in part.to_pylist()]


class CompactedLog:
    """A log with ten keys whose changes up to position 100 are compacted and trimmed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writer = begin_log(root)
        commit_rows(self.writer, *(change(ORDERS, 20, n, str(n)) for n in range(5)))
        commit_rows(self.writer, *(change(ORDERS, 25 + n, 0, str(n)) for n in range(5, 10)))
        self.compaction: Any = None
        commit_rows(self.writer, change(ITEMS, 40, 0, "1"))
        self.compact(35)

    def compact(self, upto: int, **fields: Any) -> None:
        """Move the horizon, and trim every segment up to it."""
        self.compaction = simple_compaction.compact(self.root, upto, writer=self.compaction, **fields)
        log = LogReader(self.root)
        gone = [one for one in log.segments()[:-1] if one.last <= upto]
        if gone:
            self.writer.trim([one.segment for one in gone], max(one.last for one in gone))

    def state(self) -> dict[tuple[int, str], dict[int, str | None]]:
        """The rows that a complete reader has."""
        found: dict[tuple[int, str], dict[int, str | None]] = {}
        log = LogReader(self.root)
        rows = [one for batch in log.rows(START, log.durable or START) for one in batch.to_pylist()]
        fold(sorted(rows, key=lambda one: (one["position"], one["ordinal"])), found)
        return found


def test_a_state_that_is_sent_half_is_not_continued_with_single_changes_that_are_partial(tmp_path: Path):
    writer = begin_log(tmp_path)
    commit_rows(writer, *(change(ORDERS, 20, n, str(n)) for n in range(5)))
    commit_rows(writer, *(change(ORDERS, 25 + n, 0, str(n)) for n in range(5, 8)))
    # the state has a complete row of key 0 at 40; its change at 40 has no column 2, which only its older change has
    commit_rows(writer, change(ORDERS, 40, 0, "0", op="u", partial=True, after=[(1, "0")]))
    commit_rows(writer, change(ITEMS, 50, 0, "1"))
    compact(None, tmp_path, upto=Position(40), everything=True)
    log = LogReader(tmp_path)
    writer.trim([one.segment for one in log.segments() if one.last <= 20], Position(20))
    state: dict[tuple[int, str], dict[int, str | None]] = {}

    for window in windows(tmp_path, chain([7], repeat(2))):
        fold(rows_of(window), state)

    assert state[ORDERS, "0"] == {1: "0", 2: "20.0"}
    assert len(state) == 9


def test_a_state_whose_tombstones_of_rows_that_were_sent_are_gone_is_refused(tmp_path: Path):
    log = CompactedLog(tmp_path)
    first = next_window(LogReader(tmp_path), START, None, 7)
    assert first is not None
    commit_rows(log.writer, change(ORDERS, 60, 0, "1", op="d", before=[(1, "1")], after=None))
    commit_rows(log.writer, change(ITEMS, 65, 0, "1"))
    log.compact(60)
    second = next_window(LogReader(tmp_path), first.upto, first.bootstrap, 1)
    assert second is not None
    assert second.bootstrap is not None
    commit_rows(log.writer, change(ORDERS, 80, 0, "2"))
    commit_rows(log.writer, change(ORDERS, 90, 0, "2"))
    log.compact(80, merge=True, floor=60)  # the tombstone of key 1 goes, before it was sent

    with pytest.raises(LogTrimmed, match="tombstones") as raised:
        next_window(LogReader(tmp_path), second.upto, second.bootstrap, 10)

    assert "cdc deliveries rewind SINK" in raised.value.fix


def test_a_position_whose_later_changes_were_trimmed_is_refused_with_both_ways_out(tmp_path: Path):
    log = CompactedLog(tmp_path)
    commit_rows(log.writer, change(ORDERS, 60, 0, "1"))

    with pytest.raises(LogTrimmed, match="no longer has single changes after") as raised:
        next_window(LogReader(tmp_path), Position(20), None, 10)

    assert "cdc deliveries rewind SINK' to send the state of every row" in raised.value.fix
    assert f"--to {LogReader(tmp_path).oldest!s}" in raised.value.fix


@QUIET
@given(seed=st.integers(0, 10**6))
def test_compactions_between_any_two_windows_lose_no_row(tmp_path_factory: pytest.TempPathFactory, seed: int):
    random, root = Random(seed), tmp_path_factory.mktemp("log") / "log"
    log = CompactedLog(root)
    state: dict[tuple[int, str], dict[int, str | None]] = {}
    after, bootstrap, position = START, None, 50
    for _ in range(12):
        if random.random() < 0.5:
            position += 10
            op = {"op": "d", "after": None, "before": [(1, "x")]} if random.random() < 0.3 else {}
            commit_rows(log.writer, change(ORDERS, position, 0, str(random.randint(0, 9)), **op))
            if random.random() < 0.5 and (bootstrap is not None or not after):
                log.compact(position, merge=random.random() < 0.5)
        window = next_window(LogReader(root), after, bootstrap, random.randint(1, 4))
        if window is not None:
            fold(rows_of(window), state)
            after, bootstrap = window.upto, window.bootstrap
    while (window := next_window(LogReader(root), after, bootstrap, 3)) is not None:
        fold(rows_of(window), state)
        after, bootstrap = window.upto, window.bootstrap

    assert state == log.state()


def test_positions_never_decrease_over_parts_and_windows(tmp_path: Path):
    random = Random(7)
    commit_in_groups(begin_log(tmp_path), random_transactions(random, 20, 30, most=20), random)

    found = [place for window in windows(tmp_path, repeat(6)) for place in places(window)]

    assert found == sorted(found)
    assert len(found) == len([list(same) for _, same in groupby(found)])
