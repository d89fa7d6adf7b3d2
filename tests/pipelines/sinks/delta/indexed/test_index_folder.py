"""Index folder: created and locked when it is needed, and replaced by a temporary one when it cannot be used."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from pipelines.sinks.delta.indexed.index_folder import LOCK, IndexFolder


def test_a_folder_is_created_at_its_first_use_and_stays(tmp_path: Path) -> None:
    folder = IndexFolder(tmp_path / "index")
    assert not (tmp_path / "index").exists()
    (folder.path / "file").touch()
    folder.close()

    assert sorted(file.name for file in (tmp_path / "index").iterdir()) == ["file", LOCK]
    assert not folder.is_temporary


def test_a_folder_that_was_never_used_leaves_nothing(tmp_path: Path) -> None:
    IndexFolder(tmp_path / "index").close()

    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_replaced_until_it_is_closed(tmp_path: Path) -> None:
    first, second, third = (IndexFolder(tmp_path / "index") for _ in range(3))
    assert first.path == tmp_path / "index"
    replacement = second.path
    assert second.is_temporary
    assert replacement.is_dir()
    second.close()
    first.close()

    assert not replacement.exists()
    assert third.path == tmp_path / "index"
    third.close()


def test_a_folder_that_cannot_be_made_is_replaced_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "index").touch()
    folder = IndexFolder(tmp_path / "index")
    with capture_logs() as logs:
        assert folder.path.is_dir()

    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert folder.is_temporary
    folder.close()


def test_a_cleared_folder_keeps_only_its_lock(tmp_path: Path) -> None:
    folder = IndexFolder(tmp_path)
    (folder.path / "file").touch()
    (folder.path / "folder").mkdir()
    folder.clear()

    assert [file.name for file in tmp_path.iterdir()] == [LOCK]
    folder.close()
