"""Damaged commits: which commits count as complete, and what is left of a table once the others are removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc.errors import TargetUnusable
from pipelines.sinks.delta.damaged_commits import remove_damaged_commits, remove_damaged_newest


@pytest.fixture(name="table")
def _table(tmp_path: Path) -> Path:
    """A table with versions 0 to 5, one row each."""
    for number in range(6):
        write_deltalake(str(tmp_path / "table"), pa.table({"a": [number]}), mode="append")
    return tmp_path / "table"


def commit(table: Path, version: int) -> Path:
    return table / "_delta_log" / f"{version:020d}.json"


def rows(table: Path) -> list[int]:
    return sorted(pa.table(DeltaTable(str(table)).scan())["a"].to_pylist())


def written(table: Path, version: int, *actions: dict[str, Any]) -> Path:
    """Write a commit by hand."""
    commit(table, version).write_text("".join(json.dumps(action) + "\n" for action in actions))
    return commit(table, version)


def test_a_whole_table_stays_as_it_is(table: Path) -> None:
    DeltaTable(str(table)).create_checkpoint()
    before = sorted((table / "_delta_log").iterdir())
    remove_damaged_commits(str(table), -1)
    remove_damaged_newest(str(table))
    remove_damaged_commits(str(table / "none"), -1)
    remove_damaged_commits("s3://bucket/table", -1)

    assert sorted((table / "_delta_log").iterdir()) == before
    assert rows(table) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("content", [b"", b'{"commitInfo": {', b"\0" * 300])
def test_the_first_damaged_commit_and_all_later_ones_go(table: Path, content: bytes) -> None:
    commit(table, 4).write_bytes(content)
    remove_damaged_commits(str(table), 3)

    assert rows(table) == [0, 1, 2, 3]
    assert DeltaTable(str(table)).version() == 3


def test_a_missing_commit_takes_the_later_ones_along(table: Path) -> None:
    commit(table, 4).unlink()
    remove_damaged_commits(str(table), 2)

    assert rows(table) == [0, 1, 2, 3]


def test_a_commit_without_one_of_its_data_files_goes(table: Path) -> None:
    for action in map(json.loads, commit(table, 5).read_text().splitlines()):
        if "add" in action:
            (table / action["add"]["path"]).write_bytes(b"")
    remove_damaged_commits(str(table), 4)

    assert rows(table) == [0, 1, 2, 3, 4]


def test_a_data_file_that_a_later_commit_removed_may_be_gone(table: Path) -> None:
    opened = DeltaTable(str(table))
    opened.optimize.compact()
    opened.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    remove_damaged_commits(str(table), 2)

    assert rows(table) == [0, 1, 2, 3, 4, 5]
    assert DeltaTable(str(table)).version() == opened.version()


def test_an_earlier_commit_that_is_damaged_is_no_matter_of_a_loss_of_power(table: Path) -> None:
    commit(table, 3).write_bytes(b"")
    with pytest.raises(TargetUnusable, match=r"commit 3 in the Delta log of target .* is empty or missing"):
        remove_damaged_commits(str(table), 4)

    assert commit(table, 5).exists()


@pytest.mark.parametrize("part", ["checkpoint", "hint"])
def test_a_checkpoint_that_is_not_complete_goes_and_the_commits_are_read(table: Path, part: str) -> None:
    DeltaTable(str(table)).create_checkpoint()
    hint, (checkpoint,) = table / "_delta_log/_last_checkpoint", (table / "_delta_log").glob("*.checkpoint.parquet")
    damaged = checkpoint if part == "checkpoint" else hint
    damaged.write_bytes(damaged.read_bytes()[:40])
    remove_damaged_commits(str(table), 5)

    assert rows(table) == [0, 1, 2, 3, 4, 5]
    assert not damaged.exists()
    assert not hint.exists()


def test_a_checkpoint_goes_with_the_commit_that_it_contains(table: Path) -> None:
    DeltaTable(str(table)).create_checkpoint()
    commit(table, 5).write_bytes(b"")
    remove_damaged_commits(str(table), 4)

    assert rows(table) == [0, 1, 2, 3, 4]
    assert [*(table / "_delta_log").glob("*checkpoint*")] == []


def test_commits_before_a_checkpoint_may_be_missing(table: Path) -> None:
    DeltaTable(str(table)).create_checkpoint()
    write_deltalake(str(table), pa.table({"a": [6]}), mode="append")
    for version in (2, 3):
        commit(table, version).unlink()
    remove_damaged_commits(str(table), 1)

    assert rows(table) == [0, 1, 2, 3, 4, 5, 6]


TXN = {"txn": {"appId": "us", "version": 1}}
FILE = {"add": {"path": "file.parquet", "size": 4, "partitionValues": {}, "modificationTime": 0, "dataChange": True}}


@pytest.mark.parametrize(
    ("info", "actions", "is_whole"),
    [
        ({"cdc.txn": "us"}, [FILE], False),
        ({"cdc.txn": "us"}, [FILE, TXN], True),
        ({"operationMetrics": {"numFiles": "2"}}, [TXN, FILE], False),
        ({"operationMetrics": {"numTargetFilesAdded": "1", "numTargetFilesRemoved": "1"}}, [TXN, FILE], False),
        ({"operationMetrics": {"numTargetFilesAdded": "1", "numTargetFilesRemoved": "0"}}, [TXN, FILE], True),
        ({"operationMetrics": {"numAddedFiles": "3"}}, [], False),
        ({"operationMetrics": {"numFiles": "2"}}, [FILE], True),  # of another client
        ({}, [], True),
    ],
)
def test_a_commit_that_ends_too_early_is_known_by_what_its_first_line_says(
    table: Path, info: dict[str, Any], actions: list[dict[str, Any]], *, is_whole: bool
) -> None:
    (table / "file.parquet").write_bytes(b"PAR1")
    file = written(table, 6, {"commitInfo": info}, *actions)
    remove_damaged_commits(str(table), 5)

    assert file.exists() is is_whole
