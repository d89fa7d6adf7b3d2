"""plan: whatever was compacted and trimmed meanwhile, every range folds to the state at its end, or is refused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import LogTrimmed
from cdc.log import lost_range_records, read_plan
from cdc.log.disk_format import LogFile
from cdc.log.read_plan import LogSnapshot
from cdc.log.trim_plan import trimmable
from cdc.position import Position
from tests.fixtures.examples import examples

Rows = list[tuple[int, str, int | None]]
"""(position, key, value), None for a delete."""
Script = list[tuple[Any, ...]]
"""Steps with what they are given."""


@dataclass
class Consumer:
    """Reads with a view that may be old, in batches."""

    view: LogSnapshot
    position: int = 0
    state: dict[str, tuple[int, int]] = field(default_factory=dict)

    def advance(self, model: Model, max_rows: int | None) -> None:
        """One batch; a chunk of positions in the middle of a transaction must never be its end."""
        view, after = self.view, Position(self.position)
        if 0 < after < min(view.floor, view.oldest):
            for refused in (read_plan.files, lambda v, a, _: read_plan.boundary(v, a, max_rows)):
                with pytest.raises(LogTrimmed):
                    refused(view, after, view.durable)
            return
        upto = read_plan.boundary(view, after, max_rows)
        assert after < upto <= view.durable or after == upto >= view.durable
        found = model.rows(read_plan.files(view, after, upto), after, upto)
        assert len(found) == len(set(found))
        if any(after < gap.last and after < gap.recorded_at <= upto for gap in model.lost):
            self.state = model.state(upto)  # it is told, and copied anew
        else:
            self.state = fold(self.state, found)
        self.position = upto
        assert self.state == model.state(upto)


@dataclass
class Historian:
    """Wants every change; a restart goes on from its position with any later view."""

    view: LogSnapshot
    position: int = 0
    begins: int = 0
    baseline: dict[str, tuple[int, int]] = field(default_factory=dict)
    seen: Rows = field(default_factory=list)

    def advance(self, model: Model, max_rows: int | None) -> None:
        view, after = self.view, Position(self.position)
        if 0 < after < view.oldest:
            with pytest.raises(LogTrimmed, match=str(view.oldest)):
                read_plan.history(view, after, view.durable)
            return
        upto = read_plan.boundary(view, after, max_rows)
        wanted = read_plan.history(view, after, upto)
        if wanted.baseline or (not after and view.oldest):
            self.begins = view.horizon
            self.baseline = fold({}, model.rows(list(wanted.baseline), 0, view.horizon))
        self.seen += model.rows(list(wanted.changes), after, upto)
        self.position = upto
        assert self.baseline == (model.state(self.begins) if self.begins else {})
        assert sorted(self.seen) == sorted(row for row in model.every if self.begins < row[0] <= upto)


class Model:
    """A log in memory: its files as the writer and a compaction leave them."""

    def __init__(self) -> None:
        self.every: Rows = []
        self.left: Rows = []
        """Of every row those that were not lost."""
        self.lost: list[lost_range_records.LostRange] = []
        self.content: dict[str, Rows] = {}
        self.view = LogSnapshot(changes=(), durable=Position(0))
        self.segment = 0

    def append(self, changes: list[tuple[str, int | None]], *, roll: bool) -> None:
        """A file of transactions of up to two keys each."""
        placed = {(self.view.durable + 1 + n // 2, key): value for n, (key, value) in enumerate(changes)}
        rows = [(position, key, value) for (position, key), value in placed.items()]
        self.segment += roll
        self.every += rows
        self.left += rows
        changed = (*self.view.changes, self._file(rows, self.segment))
        self.view = replace(self.view, changes=changed, durable=Position(rows[-1][0]))

    def compact(self, share: float, floor: float) -> None:
        """A run up to somewhere behind the horizon, with the older ones merged when the floor moves."""
        view = self.view
        horizon = view.horizon + round((view.durable - view.horizon) * share)
        rows = latest([row for row in self.left if view.horizon < row[0] <= horizon])
        runs = list(view.compacted)
        low = round(horizon * floor)
        if low > view.floor:
            whole = latest([row for file in runs for row in self.content[file.path]] + rows)
            rows, runs = [row for row in whole if row[2] is not None or row[0] > low], []
            view = replace(view, floor=Position(low))
        runs += [self._file(rows, 0)] if rows else []
        self.view = replace(view, compacted=tuple(runs), horizon=Position(horizon))

    def lose(self, share: float) -> None:
        """A file of changes is given up, of which a file behind the end tells."""
        files = [file for file in self.view.changes if not file.schemas_only]
        if not files:
            return
        gone, told = files[round((len(files) - 1) * share)], Position(self.view.durable + 1)
        mark = replace(self._file([(told, "", None)], self.segment), schemas_only=True)
        named = replace(mark, path=lost_range_records.lost_range_file_name(gone.first, gone.last))
        self.content[named.path] = []
        self.left = [row for row in self.left if row not in self.content[gone.path]]
        self.lost.append(lost_range_records.LostRange(gone.first, gone.last, told))
        changed = (*(file for file in self.view.changes if file is not gone), named)
        self.view = replace(self.view, changes=changed, durable=told)

    def trim(self) -> None:
        """All that may go, with nobody asked."""
        view = self.view
        segments, upto = trimmable(view.changes, horizon=view.horizon, consumers=(), max_age=0.0, now_us=1 << 60)
        left = tuple(file for file in view.changes if file.segment not in segments)
        self.view = replace(view, changes=left, oldest=max(view.oldest, upto))

    def rows(self, files: list[LogFile], after: int, upto: int) -> Rows:
        return [row for f in files for row in self.content[f.path] if max(after, f.skip_upto) < row[0] <= upto]

    def state(self, at: int) -> dict[str, tuple[int, int]]:
        return fold({}, [row for row in self.every if row[0] <= at])

    def _file(self, rows: Rows, segment: int) -> LogFile:
        path = f"{len(self.content):04}"
        self.content[path] = rows
        positions = [row[0] for row in rows]
        return LogFile(
            path=path,
            rows=len(rows),
            size=1,
            first=Position(min(positions)),
            last=Position(max(positions)),
            segment=segment,
            committed_at=1,
        )


def latest(rows: Rows) -> Rows:
    return list({row[1]: row for row in sorted(rows, key=lambda row: row[0])}.values())


def fold(state: dict[str, tuple[int, int]], rows: Rows) -> dict[str, tuple[int, int]]:
    state = dict(state)
    for position, key, value in sorted(rows, key=lambda row: row[0]):
        state.pop(key, None)
        if value is not None:
            state[key] = (position, value)
    return state


changes = st.lists(st.tuples(st.sampled_from("abcd"), st.none() | st.integers(0, 9)), min_size=1, max_size=5)
some = st.integers(0, 2)
kinds: list[st.SearchStrategy[Any]] = [
    st.tuples(st.just("append"), changes, st.booleans()),
    st.tuples(st.just("compact"), st.sampled_from([0.3, 0.7, 1.0]), st.sampled_from([0.0, 0.5, 1.0])),
    st.tuples(st.just("trim")),
    st.tuples(st.just("look"), some),
    st.tuples(st.just("read"), some, st.none() | st.integers(1, 6)),
    st.tuples(st.just("join"), some),
]
steps = st.lists(st.one_of(kinds), max_size=30)
losing = st.lists(st.one_of([*kinds, st.tuples(st.just("lose"), st.sampled_from([0.0, 0.5, 1.0]))]), max_size=30)


begun = st.lists(changes, min_size=2, max_size=5)


def play(script: Script, kind: type[Consumer | Historian]) -> None:
    """Let three readers of a kind live through the steps, and come to the end."""
    model = Model()
    readers = [kind(model.view) for _ in range(3)]
    for step, *given_ in script:
        if step == "append":
            model.append(given_[0], roll=given_[1])
        elif step == "compact":
            model.compact(*given_)
        elif step == "trim":
            model.trim()
        elif step == "lose":
            model.lose(given_[0])
        elif step == "join":
            readers[given_[0]] = kind(model.view)
        elif step == "look":
            readers[given_[0]].view = model.view
        else:
            readers[given_[0]].advance(model, given_[1])
    for reader in readers:
        reader.view = model.view
        reader.advance(model, 1)
        reader.advance(model, None)


@given(begun.map(lambda commits: [("append", commit, True) for commit in commits]), steps)
@examples(60)
def test_consumers_come_to_the_state_at_their_position_or_are_told_that_they_are_too_late(
    begun: Script, script: Script
):
    play([*begun, *script], Consumer)


@given(begun.map(lambda commits: [("append", commit, True) for commit in commits]), losing)
@examples(30)
def test_of_lost_rows_every_consumer_is_told_in_the_batch_that_lacks_them(begun: Script, script: Script):
    play([*begun, *script], Consumer)


@given(begun.map(lambda commits: [("append", commit, True) for commit in commits]), steps)
@examples(50)
def test_history_is_the_state_at_a_cut_and_every_change_behind_it_or_is_refused(begun: Script, script: Script):
    play([*begun, *script], Historian)


def test_history_that_is_gone_is_refused_with_the_oldest_position():
    view = view_of_a_trimmed_log()
    for after, upto in ((3, 6), (2, 6), (0, 4)):
        with pytest.raises(LogTrimmed, match="0/5"):
            read_plan.history(view, Position(after), Position(upto))
    assert read_plan.history(view, Position(5), Position(6)) == read_plan.HistoryPlan(changes=list(view.changes))
    assert read_plan.history(view, Position(3), Position(3)) == read_plan.HistoryPlan(changes=[])


def view_of_a_trimmed_log() -> LogSnapshot:
    model = Model()
    for number in range(6):
        model.append([("a", number)], roll=True)
    model.compact(0.8, 0.5)
    model.trim()
    return model.view


def test_a_range_of_changes_that_are_gone_is_refused_with_the_oldest_position():
    view = view_of_a_trimmed_log()
    assert (view.oldest, view.horizon, view.floor) == (5, 5, 2)
    with pytest.raises(LogTrimmed, match=r"up to 0/4: single changes up to 0/5 are trimmed"):
        read_plan.files(view, Position(3), Position(4))
    with pytest.raises(LogTrimmed, match=r"from 0/1: .* up to 0/5 are trimmed, .* 0/2 are removed"):
        read_plan.files(view, Position(1), Position(6))


def test_a_range_that_begins_at_the_oldest_position_reads_changes_alone():
    view = view_of_a_trimmed_log()
    assert read_plan.files(view, Position(5), Position(6)) == list(view.changes)


def test_what_is_compacted_is_not_read_from_a_file_of_changes_that_reaches_beyond_the_horizon():
    model = Model()
    model.append([("a", 1)], roll=True)
    model.append([("a", 2), ("b", 2), ("a", 3), ("b", 3)], roll=True)
    model.compact(0.7, 0.0)
    model.trim()
    found = model.rows(read_plan.files(model.view, Position(0), Position(3)), 0, 3)
    assert found == [(2, "a", 2), (2, "b", 2), (3, "a", 3), (3, "b", 3)]


def test_an_empty_range_is_never_refused():
    assert read_plan.files(view_of_a_trimmed_log(), Position(1), Position(1)) == []
