"""Which version of a target is current, and what stays known of it, row by row of the table in the module."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc.errors import SinkUnavailable
from pipelines.sinks.delta.current_version import CurrentVersion, IndexedCommit

ROWS = pa.table({"id": [1]})


@pytest.fixture(name="current")
def _current(tmp_path: Path) -> CurrentVersion:
    """The second version of a table, of which something is known."""
    uri = str(tmp_path / "target")
    for _ in range(2):
        write_deltalake(uri, ROWS, mode="append")
    current = CurrentVersion(uri, DeltaTable(uri))
    current.contents.transactions["app"] = 7
    current.contents.file_count = 2, 2_000
    current.last_column_change = 5
    return current


def append(current: CurrentVersion) -> None:
    """Commit rows as another client does, or as this process does without the table that delta-rs has open."""
    write_deltalake(current.uri, ROWS, mode="append")


def test_everything_stays_known_if_nobody_commits(current: CurrentVersion) -> None:
    known = current.contents
    current.refresh()

    assert current.contents is known
    assert (current.number, known.file_count, current.last_column_change) == (1, (2, 2_000), 5)


def test_nothing_stays_known_after_a_commit_of_another_client(current: CurrentVersion) -> None:
    append(current)
    assert current.is_overtaken
    current.refresh()

    assert not current.is_overtaken
    assert (current.number, current.contents.transactions) == (2, {})
    assert (current.contents.file_count, current.last_column_change) == (None, None)


def test_a_commit_through_delta_rs_changes_only_the_files(current: CurrentVersion) -> None:
    write_deltalake(current.table, ROWS, mode="append")
    current.record_commit(1, {"app": 9})

    assert (current.number, current.contents.transactions) == (2, {"app": 9})
    assert (current.contents.file_count, current.last_column_change) == (None, 5)


def test_a_commit_that_is_not_recorded_leaves_nothing_known(current: CurrentVersion) -> None:
    write_deltalake(current.table, ROWS, mode="append")

    assert (current.number, current.contents.transactions) == (2, {})


def test_delta_rs_reads_an_own_commit_when_it_is_needed(current: CurrentVersion) -> None:
    opened = current.table
    append(current)
    current.record_own_commit(1, 2, {"app": 9})
    current.indexed_commit = IndexedCommit(2, 7)

    assert (current.number, opened.version()) == (2, 1)
    assert (current.contents.transactions, current.contents.file_count) == ({"app": 9}, None)
    assert current.copied == 7
    assert current.table.version() == 2
    assert current.last_column_change == 5


@pytest.mark.parametrize("is_own", [True, False])
def test_a_commit_of_another_client_before_the_own_one_leaves_nothing_known(
    current: CurrentVersion, is_own: bool
) -> None:
    append(current)
    if is_own:
        append(current)
        current.record_own_commit(1, 3, {"app": 9})
        assert current.last_column_change is None
    else:
        write_deltalake(current.table, ROWS, mode="append")
        current.record_commit(1, {"app": 9})

    assert (current.number, current.contents.transactions) == (3, {})


def test_another_directory_in_the_place_of_the_table_is_found(current: CurrentVersion, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(current.uri, copy)
    append(current)
    current.refresh()
    shutil.rmtree(current.uri)
    copy.rename(current.uri)

    with pytest.raises(SinkUnavailable, match="commit 2 is missing"):
        current.refresh()
    with pytest.raises(SinkUnavailable, match="commit 2 is missing"):
        current.check_kept(2)
    current.reopen()
    assert current.number == 1
    with pytest.raises(SinkUnavailable, match="it has version 1, and version 2 was published"):
        current.check_published(2)
