"""The log of views: one commit per cut, what it was computed from, and computations that were cut off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from cdc import failpoint
from cdc.errors import LogFenced, ViewFailed
from cdc.log.computed_views import ComputedFrom, ComputedView, InputVersion
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.table import TableSchema, TableState
from pipelines.views.changed_rows import ROWS, all_new, differences
from pipelines.views.log_of_views import Cut, LogOfViews, ViewCommit, rows_of_view
from tests.log.rows import IDENTITY, LIMITS, schema_of
from tests.pipelines.views.view_pipeline import SOURCE

VIEW = schema_of(1, "note")
OTHER = replace(schema_of(2, "text"), name="other")
A, B = InputVersion("/lake/a", 3, 7, (("1",),)), InputVersion("/lake/b", 4, 8)
COMPUTED = ComputedFrom(
    20,
    {
        VIEW.topic: ComputedView("fingerprint", 20, {"shop.a": A, "shop.b": B}, 5),
        OTHER.topic: ComputedView("other", 10, {"shop.b": B}),
    },
)


def rows(*notes: str) -> pa.Table:
    images = [[(1, str(number)), (2, note)] for number, note in enumerate(notes)]
    return pa.table({"key": [[str(number)] for number in range(len(notes))], "after": images}, schema=ROWS)


def build(log: LogOfViews, position: int, *notes: str, schema: TableSchema = VIEW) -> None:
    commit = log.begin(Cut(Position(position), 1_000))
    with commit.view(schema.topic):
        commit.add_version(schema)
        commit.add_rows(schema, all_new(rows(*notes)))
        commit.end_build(schema)
    commit.commit(SOURCE, COMPUTED)


def notes(log: LogOfViews) -> list[str]:
    return sorted(dict(row["after"])[2] for row in log.now().rows(VIEW).to_pylist())


def add_half(commit: ViewCommit, schema: TableSchema) -> None:
    with commit.view(schema.topic):
        commit.add_version(schema)
        commit.add_rows(schema, all_new(rows("b", "c")))
        raise ViewFailed("half")


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> LogOfViews:
    return LogOfViews(tmp_path / "log", IDENTITY, LIMITS)


def test_a_new_log_was_computed_from_nothing(log: LogOfViews) -> None:
    assert (log.position, log.computed_from, log.schemas()) == (0, ComputedFrom(), {})


def test_a_commit_says_what_it_was_computed_from(log: LogOfViews, tmp_path: Path) -> None:
    build(log, 20, "a", "b")
    again = LogOfViews(tmp_path / "log", IDENTITY, LIMITS)

    assert (again.position, again.computed_from) == (20, COMPUTED)
    assert again.schemas() == {VIEW.topic: VIEW}
    assert notes(again) == ["a", "b"]


def test_differences_follow_and_another_build_replaces_all_rows(log: LogOfViews) -> None:
    build(log, 20, "a", "b", "c")
    commit = log.begin(Cut(Position(40), 2_000))
    with commit.view(VIEW.topic):
        commit.add_rows(VIEW, differences(log.now().rows(VIEW), rows("a", "x")))
    commit.commit(SOURCE, COMPUTED)
    assert (notes(log), commit.rows) == (["a", "x"], {VIEW.topic: 2})

    build(log, 60, "z")
    assert notes(log) == ["z"]
    reader = LogReader(log._root)
    assert rows_of_view(reader, VIEW, Position(40)).num_rows == 2
    ordinals = [row["ordinal"] for batch in reader.rows(Position(20), Position(60)) for row in batch.to_pylist()]
    assert sorted(ordinals) == [0, 0, 1, 1, 2]


def test_a_view_that_fails_leaves_nothing_in_the_commit(log: LogOfViews, tmp_path: Path) -> None:
    commit = log.begin(Cut(Position(20), 1_000))
    with commit.view(VIEW.topic):
        commit.add_version(VIEW)
        commit.add_rows(VIEW, all_new(rows("a")))
    with pytest.raises(ViewFailed):
        add_half(commit, OTHER)
    commit.add_version(VIEW.flagged(TableState.NEEDS_RESYNC, "half"))
    commit.commit(SOURCE, COMPUTED)

    reader = LogReader(tmp_path / "log")
    found = [row for batch in reader.rows(Position(0), Position(20)) for row in batch.to_pylist()]
    assert sorted((row["ordinal"], row["op"], row["relation"]) for row in found) == [
        (0, "s", 1),
        (1, "r", 1),
        (2, "s", 1),
    ]
    assert len(list((tmp_path / "log").glob("changes/segment=*/*.parquet"))) == len(reader.every_file())


def test_another_commit_at_the_last_cut_has_the_next_position(log: LogOfViews) -> None:
    build(log, 20, "a")
    build(log, 20, "b")
    assert (log.position, log.computed_from.cut, notes(log)) == (21, 20, ["b"])

    build(log, 40, "c")
    assert (log.position, notes(log)) == (40, ["c"])
    assert rows_of_view(LogReader(log._root), VIEW, Position(20)).num_rows == 1


def test_rows_are_those_of_the_commit_after_which_they_were_asked_for(log: LogOfViews) -> None:
    build(log, 20, "a")
    earlier = log.now()
    build(log, 40, "b", "c")
    assert earlier.rows(VIEW).num_rows == 1


def test_what_an_earlier_release_wrote_says_which_rows_there_are() -> None:
    text = '{"inputs": {}, "views": {"shop.v": {"fingerprint": "f", "floor": null, "position": 20}}}'
    assert ComputedFrom.from_json(text) == ComputedFrom(0, {"shop.v": ComputedView("f", 20)})


def test_nothing_is_committed_after_another_writer(log: LogOfViews, tmp_path: Path) -> None:
    build(log, 20, "a")
    build(LogOfViews(tmp_path / "log", IDENTITY, LIMITS), 40, "b")
    with pytest.raises(LogFenced):
        build(log, 60, "c")


@pytest.mark.parametrize(
    ("point", "position"), [("view_rows_added", 20), ("views_staged", 20), ("views_committed", 40)]
)
def test_a_commit_that_was_cut_off_is_there_wholly_or_not_at_all(
    log: LogOfViews, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, position: int
) -> None:
    build(log, 20, "a")
    monkeypatch.setenv(failpoint.VARIABLE, f"{point}:1:abandon")
    with pytest.raises(failpoint.Abandoned):
        build(log, 40, "b", "c")
    monkeypatch.delenv(failpoint.VARIABLE)

    again = LogOfViews(tmp_path / "log", IDENTITY, LIMITS)
    assert (again.position, notes(again)) == (position, ["a"] if position == 20 else ["b", "c"])
    build(again, 60, "d")
    assert notes(again) == ["d"]
