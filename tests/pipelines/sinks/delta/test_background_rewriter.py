"""Files are rewritten in the background: merges go on meanwhile, and nothing that was not committed is believed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads

import pytest
from deltalake import DeltaTable

from cdc.delta_protocol.table_storage import LocalStorage
from pipelines.sinks.delta.background_rewriter import NICE_INCREMENT, BackgroundRewriter, RewriteStopped, _Pace
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.indexed.delta_log import LiveFiles
from pipelines.sinks.delta.open_indexed_tables import IndexedTargets
from tests.contracts.folded import gone, put
from tests.pipelines.sinks.added_features import commit, items_by_id
from tests.pipelines.sinks.delta.test_open_indexed_tables import Opened, create

ITEMS = {number: str(number) for number in range(6)}


@pytest.fixture(name="opened")
def _opened(tmp_path: Path) -> Opened:
    """A target with six files of one row each."""
    found = Opened(create(str(tmp_path / "target")), IndexedTargets(None))
    for number in ITEMS:
        found.merge_unread(20 * number + 20, put(number, str(number), 20 * number + 10))
    return found


@pytest.fixture(name="rewriter")
def _rewriter(opened: Opened) -> BackgroundRewriter:
    return BackgroundRewriter(opened.indexed)


def files_of(opened: Opened) -> list[tuple[int | None, int]]:
    """Return the number of rows and of deleted rows of each file, sorted."""
    files = LiveFiles.read(LocalStorage(Path(opened.target.uri)))
    return sorted((file.rows, len(file.deleted)) for file in files.by_path.values())


def targets(opened: Opened) -> dict[str, DeltaTarget]:
    return {opened.target.uri: opened.target}


def test_small_files_are_merged_and_found_by_later_merges(opened: Opened, rewriter: BackgroundRewriter) -> None:
    assert rewriter.start_merge_of_small_files(opened.target)
    assert rewriter.finish(targets(opened), wait=True)
    assert (files_of(opened), items_by_id(opened.target.uri)) == ([(6, 0)], ITEMS)
    assert opened.target.version == DeltaTable(opened.target.uri).version()
    assert not rewriter.start_merge_of_small_files(opened.target)

    assert opened.merge(200, put(1, "new", 190), gone(2, 191)) == {0: "0", 1: "new", 3: "3", 4: "4", 5: "5"}
    assert files_of(opened) == [(1, 0), (6, 2)]


@pytest.mark.parametrize("client_commits", [False, True])
def test_after_a_rewrite_only_commits_of_other_clients_are_read(
    opened: Opened, rewriter: BackgroundRewriter, *, client_commits: bool
) -> None:
    rewriter.start_merge_of_small_files(opened.target)
    opened.target.transaction()
    known = opened.target.current.contents
    if client_commits:
        commit(opened.target.uri)

    assert rewriter.finish(targets(opened), wait=True)
    assert opened.target.version == DeltaTable(opened.target.uri).version()
    assert (opened.target.current.contents is known) is not client_commits
    assert opened.target.transaction() == 120


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only a process has a priority")
def test_the_thread_has_a_lower_priority_than_merges(opened: Opened, rewriter: BackgroundRewriter) -> None:
    before = {thread.native_id for thread in enumerate_threads()}
    rewriter.start_merge_of_small_files(opened.target)
    (new,) = {thread.native_id for thread in enumerate_threads() if thread.name.startswith("rewrite")} - before
    assert rewriter.finish(targets(opened), wait=True)

    assert new is not None
    assert os.getpriority(os.PRIO_PROCESS, new) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE_INCREMENT)


def test_merges_go_on_while_files_are_rewritten(opened: Opened, rewriter: BackgroundRewriter) -> None:
    rewriter.start_merge_of_small_files(opened.target)
    expected = opened.merge(200, put(7, "7", 190), gone(0, 191))  # the file of row 0 is removed
    rewriter.finish(targets(opened), wait=True)
    assert items_by_id(opened.target.uri) == expected
    rewriter.start_merge_of_small_files(opened.target)
    expected = opened.merge(220, put(8, "8", 210))

    assert rewriter.finish(targets(opened), wait=True)
    assert items_by_id(opened.target.uri) == expected
    assert files_of(opened) == [(1, 0), (6, 0)]


def test_rows_that_were_deleted_meanwhile_stay_deleted(opened: Opened, rewriter: BackgroundRewriter) -> None:
    rewriter.start_merge_of_small_files(opened.target)
    rewriter.finish(targets(opened), wait=True)
    opened.merge(200, gone(0, 190), gone(1, 191))
    assert rewriter.start_purge(opened.target)
    expected = opened.merge(220, gone(2, 210))

    assert rewriter.finish(targets(opened), wait=True)
    assert items_by_id(opened.target.uri) == expected == {3: "3", 4: "4", 5: "5"}
    assert files_of(opened) == [(4, 1)]
    assert opened.merge(240, put(2, "back", 230), put(3, "new", 231)) == {2: "back", 3: "new", 4: "4", 5: "5"}


def test_there_is_nothing_to_purge_without_deleted_rows(opened: Opened, rewriter: BackgroundRewriter) -> None:
    assert not rewriter.start_purge(opened.target)
    assert not rewriter.finish(targets(opened), wait=True)


def test_one_group_of_files_is_rewritten_at_a_time(opened: Opened, rewriter: BackgroundRewriter) -> None:
    assert (rewriter.is_busy(), rewriter.is_busy(opened.target.uri)) == (False, False)
    rewriter.start_merge_of_small_files(opened.target)
    assert (rewriter.is_busy(), rewriter.is_busy(opened.target.uri), rewriter.is_busy("other")) == (True, True, False)
    with pytest.raises(ValueError, match="still rewrites the files"):
        rewriter.start_merge_of_small_files(opened.target)


def test_a_target_that_the_indexed_writer_does_not_write_is_not_rewritten(tmp_path: Path, opened: Opened) -> None:
    other = create(str(tmp_path / "other"))
    rewriter = BackgroundRewriter(opened.indexed)

    assert (rewriter.rewrites(opened.target), rewriter.rewrites(other)) == (True, False)
    assert not rewriter.start_merge_of_small_files(other)


def _close(opened: Opened) -> dict[str, DeltaTarget]:
    opened.indexed.close()
    return targets(opened)


def _reopen(opened: Opened) -> dict[str, DeltaTarget]:
    opened.indexed.close()
    opened.merge(200, put(9, "9", 190))
    return targets(opened)


CHANGES: dict[str, Callable[[Opened], dict[str, DeltaTarget]]] = {
    "closed": _close,
    "opened again": _reopen,
    "not open": lambda _: {},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_files_of_a_target_that_was_closed_meanwhile_stay(
    opened: Opened, rewriter: BackgroundRewriter, change: Callable[[Opened], dict[str, DeltaTarget]]
) -> None:
    rewriter.start_merge_of_small_files(opened.target)
    left = change(opened)
    before = files_of(opened)

    assert not rewriter.finish(left, wait=True)
    assert (files_of(opened), rewriter.is_busy()) == (before, False)


def test_an_error_of_the_thread_is_raised_once(opened: Opened, rewriter: BackgroundRewriter) -> None:
    for file in Path(opened.target.uri).glob("*.parquet"):
        file.rename(file.with_suffix(".away"))
    rewriter.start_merge_of_small_files(opened.target)
    with pytest.raises(FileNotFoundError):
        rewriter.finish(targets(opened), wait=True)

    assert not rewriter.finish(targets(opened), wait=True)
    assert not rewriter.is_busy()


def test_a_closed_rewriter_commits_nothing_and_can_begin_again(opened: Opened, rewriter: BackgroundRewriter) -> None:
    slow = BackgroundRewriter(opened.indexed, rate=1.0)
    slow.start_merge_of_small_files(opened.target)
    slow.close()
    assert not slow.finish(targets(opened), wait=True)
    assert files_of(opened) == [(1, 0)] * 6
    rewriter.close()
    rewriter.start_merge_of_small_files(opened.target)

    assert rewriter.finish(targets(opened), wait=True)
    assert files_of(opened) == [(6, 0)]


def test_a_pace_ends_with_the_sink() -> None:
    stop = Event()
    pace = _Pace(1 << 30, stop)
    pace(1)
    stop.set()
    with pytest.raises(RewriteStopped):
        pace(1 << 60)
