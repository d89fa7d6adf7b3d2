"""Durable: a file is replaced as a whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc import atomic_file


def test_a_file_is_replaced_and_nothing_else_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    for content in (b"first", b"second", b""):
        atomic_file.replace(path, content)

        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]


def test_a_replacement_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    (path / "inside").mkdir(parents=True)  # a directory gives no way to a file

    with pytest.raises(OSError, match="told"):
        atomic_file.replace(path, b"content")

    assert list(tmp_path.iterdir()) == [path]
    assert (path / "inside").is_dir()
