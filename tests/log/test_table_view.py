"""View of a table of the log: however it was reached, a version has the same files, positions and metadata."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.delta_protocol.checkpoints import checkpoint
from cdc.delta_protocol.commits import commit_file
from cdc.errors import LogCorrupt
from cdc.log.disk_format import CHANGES, trimmed_id
from cdc.log.fenced_table import CHECKPOINT_EVERY
from cdc.log.table_io import open_table
from cdc.log.table_view import REOPEN_AFTER, LogTableView
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.faults.log_workload import CLOSED
from tests.fixtures.examples import examples
from tests.log.rows import IDENTITY, info, row, schema_of, table
from tests.log.simple_compaction import compact


def rows_at(position: int) -> list[dict[str, Any]]:
    """A transaction with a schema version, which gets a file of its own, and a row."""
    schema = row(position, op="s", key=None, after=None, payload=schema_of().to_json())
    return [schema, row(position, 1, key=[str(position)])]


def append(writer: LogWriter, position: int) -> None:
    writer.commit(writer.stage(table(*rows_at(position))), info(position))


def check_same(view: LogTableView, now: LogTableView) -> None:
    assert view.version == now.version
    assert sorted(view.files(), key=str) == sorted(now.files(), key=str)
    assert [view.transaction(name) for name in (now.id, trimmed_id(now.id), "none")] == [
        now.transaction(name) for name in (now.id, trimmed_id(now.id), "none")
    ]
    seen, expected = view.last_commit(), now.last_commit()
    assert {key: value for key, value in seen.items() if key.startswith("cdc.")} == {
        key: value for key, value in expected.items() if key.startswith("cdc.")
    }
    assert seen["timestamp"] == expected["timestamp"]
    assert sorted(view.listing()["path"].to_pylist()) == sorted(now.listing()["path"].to_pylist())


@examples(8)
@given(st.lists(st.sampled_from(["append", "trim", "rewrite", "advance", "list"]), min_size=1, max_size=12))
def test_a_view_that_was_advanced_is_as_one_that_is_opened_now(steps: list[str]) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        writer = LogWriter.open(root, IDENTITY, CLOSED)
        append(writer, 10)
        view, last = LogTableView(root / CHANGES), 10
        for step in steps:
            if step == "append":
                last += 10
                append(writer, last)
            elif step == "trim" and last > 20:
                compact(root, last - 10)
                writer.trim([file.segment for file in view.files() if file.last <= last - 10][:1], Position(last - 10))
            elif step == "rewrite":
                old = view.files()[-1]
                merged = writer.stage(table(rows_at(int(old.last))[0 if old.schemas_only else 1]))
                writer.rewrite(merged, [str(Path(old.path).relative_to(root / CHANGES))])
            elif step == "advance":
                view.advance()
            else:
                view.files()
        view.advance()
        check_same(view, LogTableView(root / CHANGES))


@pytest.mark.parametrize("commits", [3, REOPEN_AFTER + 3])
def test_a_view_whose_next_commits_were_cleaned_away_continues_at_the_checkpoint(tmp_path: Path, commits: int) -> None:
    writer = LogWriter.open(tmp_path, IDENTITY, CLOSED)
    append(writer, 10)
    view = LogTableView(tmp_path / CHANGES)
    for position in range(20, 20 + commits):
        append(writer, position)
    checkpoint(tmp_path / CHANGES, open_table(tmp_path / CHANGES).version(), keep=0)
    assert not commit_file(tmp_path / CHANGES, view.version + 1).exists()
    view.advance()

    check_same(view, LogTableView(tmp_path / CHANGES))


def test_a_copy_keeps_its_version(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path, IDENTITY, CLOSED)
    append(writer, 10)
    view = LogTableView(tmp_path / CHANGES)
    before = copy(view)
    append(writer, 20)
    view.advance()

    assert (before.version, before.transaction(before.id), view.transaction(view.id)) == (view.version - 1, 10, 20)
    assert [file.last for file in before.files()] == [10, 10]
    assert len(view.files()) == 4


def test_delta_rs_reads_no_commit_that_the_view_has_read(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path, IDENTITY, CLOSED)
    append(writer, 10)
    view = LogTableView(tmp_path / CHANGES)
    view.files()
    opened = view._table.version()
    for position in range(20, 20 + CHECKPOINT_EVERY):
        append(writer, position)
        view.advance()
    assert view.transaction(view.id) == 20 + CHECKPOINT_EVERY - 1
    assert len(view.files()) == 2 * (1 + CHECKPOINT_EVERY)

    assert view._table.version() == opened


@pytest.mark.parametrize("content", ["{", "[]", '{"add": {}}', "no action"])
def test_a_commit_that_cannot_be_read_is_an_error_of_the_log(tmp_path: Path, content: str) -> None:
    append(LogWriter.open(tmp_path, IDENTITY, CLOSED), 10)
    view = LogTableView(tmp_path / CHANGES)
    commit_file(tmp_path / CHANGES, view.version + 1).write_text(content)
    version = view.version
    with pytest.raises(LogCorrupt, match=f"commit {version + 1} of table 'changes' of the log cannot be read"):
        view.advance()

    assert view.version == version


@pytest.mark.parametrize(
    "read", [LogTableView.last_commit, lambda view: view.transaction("none")], ids=["last_commit", "transaction"]
)
def test_a_log_that_is_deleted_under_an_open_view_is_an_error_of_the_log(
    tmp_path: Path, read: Callable[[LogTableView], object]
) -> None:
    append(LogWriter.open(tmp_path, IDENTITY, CLOSED), 10)
    view = LogTableView(tmp_path / CHANGES)
    shutil.rmtree(tmp_path / CHANGES)

    with pytest.raises(LogCorrupt, match="table 'changes' of the log cannot be read"):
        read(view)
