"""Commit files of Delta tables: a version is made once, and a commit that nobody can read is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc import atomic_file
from cdc.delta_protocol.actions import commit_info, decode_commit, txn_action
from cdc.delta_protocol.commits import (
    CreateFile,
    commit_file,
    commit_name,
    commit_path,
    create_commit,
    replace_commit,
    rewrite_commit,
)
from cdc.delta_protocol.table_storage import LocalStorage


def table_in(folder: Path) -> Path:
    """The directory of a table without commits."""
    (folder / "_delta_log").mkdir()
    return folder


def below(table: Path) -> CreateFile:
    """What creates files as the log does."""
    return lambda path, content: atomic_file.create(table / path, content)


def test_a_version_is_a_file_with_twenty_digits() -> None:
    assert commit_file(Path("changes"), 3) == Path("changes", commit_path(3))
    assert commit_path(3) == f"_delta_log/{commit_name(3)}" == "_delta_log/00000000000000000003.json"


def test_a_version_is_made_once_by_whatever_creates_its_file(tmp_path: Path) -> None:
    table, storage = table_in(tmp_path), LocalStorage(tmp_path)
    actions = [commit_info("WRITE"), txn_action("app", 7)]

    create_commit(storage.create, 0, actions)
    create_commit(storage.create_durably, 1, actions)

    assert [decode_commit(commit_file(table, version).read_bytes()) for version in (0, 1)] == [actions, actions]
    for create in (
        storage.create,
        storage.create_durably,
        lambda path, content: atomic_file.create(table / path, content),
    ):
        with pytest.raises(FileExistsError):
            create_commit(create, 1, [])
    assert decode_commit(commit_file(table, 1).read_bytes()) == actions


def test_a_replaced_commit_is_another_file_and_a_rewritten_one_has_the_same_content(tmp_path: Path) -> None:
    table, info = table_in(tmp_path), commit_info("WRITE")
    commit = commit_file(table, 0)
    commit.write_bytes(b"{torn")

    replace_commit(table, 0, [info])
    replaced = commit.stat().st_ino, commit.read_bytes()
    with commit.open("rb"):  # so that its inode is not used again
        rewrite_commit(table, 0)

        assert decode_commit(replaced[1]) == [info]
        assert commit.read_bytes() == replaced[1]
        assert commit.stat().st_ino != replaced[0]
