"""Durable: a file is replaced as a whole, or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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


def test_a_created_file_has_its_content_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "created.json"
    atomic_file.create(path, b"content")

    assert path.read_bytes() == b"content"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_exists_is_not_created_again(tmp_path: Path) -> None:
    path = tmp_path / "created.json"
    atomic_file.create(path, b"first")
    with pytest.raises(FileExistsError):
        atomic_file.create(path, b"second")

    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_of_several_creators_of_a_file_one_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "created.json"

    def create(number: int) -> int | None:
        try:
            atomic_file.create(path, str(number).encode())
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(8) as threads:
        created = [number for number in threads.map(create, range(64)) if number is not None]

    assert [str(number).encode() for number in created] == [path.read_bytes()]
