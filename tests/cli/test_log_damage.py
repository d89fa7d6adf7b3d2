"""`cdc log verify` finds damage; `cdc log drop-file` says what is lost, asks, and refuses an undamaged file."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.config import load_definition
from cdc.log.reader import LogReader
from tests.cli.command import run
from tests.cli.trimmed import Folder
from tests.cli.whole_log import whole_log_definition


def broken(folder: Folder, position: int) -> str:
    """Cut the file at a position short; its name as verify has it."""
    (file,) = (file for file in LogReader(folder.root).every_file() if file.first == position)
    path = Path(file.path)
    path.write_bytes(path.read_bytes()[:100])
    return str(path.relative_to(folder.root))


def test_verify_names_the_command_and_the_command_says_what_it_gave_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(tmp_path)
    file = broken(folder, 150)
    told = run(capsys, "log", "verify", "-c", folder.path)
    assert told.status == 4
    assert file in told.output
    assert "cdc log drop-file" in told.output
    outcome = run(capsys, "log", "drop-file", file, "--yes", "-c", folder.path, "--json")
    assert outcome.status == 0, outcome.output
    result = outcome.envelope["result"]
    assert result == {"file": file, "way": "given_up", "first": "0/96", "last": "0/96", "marked": ["shop.orders"]}
    with Catalog.open(load_definition(folder.path).catalog.url) as catalog:
        assert [entry.action for entry in catalog.audit.ls()] == ["log.drop_file"]
    told = run(capsys, "log", "drop-file", broken(folder, 160), "--yes", "-c", folder.path)
    assert "start the reader, then run: cdc tables resync shop.orders" in told.output
    after = run(capsys, "log", "verify", "-c", folder.path)
    assert after.status == 0
    assert "lost with a damaged file; positions 0/96 to 0/96" in after.output


def test_nothing_is_done_without_a_yes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(tmp_path)
    file = broken(folder, 150)
    before = LogReader(folder.root).version
    outcome = run(capsys, "log", "drop-file", file, "-c", folder.path)
    assert outcome.status == 2
    assert "lose 2 rows at 0/96 to 0/96, and mark their tables as needs_resync" in outcome.errors
    assert LogReader(folder.root).version == before


@pytest.mark.slow
def test_what_is_compacted_is_trimmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(tmp_path)
    folder.compacted(170)
    outcome = run(capsys, "log", "drop-file", broken(folder, 150), "--yes", "-c", folder.path)
    assert outcome.status == 0, outcome.errors
    assert "whose changes are compacted" in outcome.output
    assert LogReader(folder.root).oldest == 150


def test_a_sound_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(tmp_path)
    file = Path(LogReader(folder.root).every_file()[0].path).relative_to(folder.root)
    outcome = run(capsys, "log", "drop-file", file, "--yes", "-c", folder.path)
    assert outcome.status == 2
    assert "is not damaged" in outcome.errors


@pytest.fixture(name="whole")
def _whole(tmp_path: Path) -> Path:
    return whole_log_definition(tmp_path)


def test_verify_of_a_sound_log_says_what_it_read(capsys: pytest.CaptureFixture[str], whole: Path) -> None:
    outcome = run(capsys, "log", "verify", "-c", whole)
    assert outcome.status == 0
    assert "10 of 10 files read, 27 rows" in outcome.output
    assert run(capsys, "log", "verify", "-c", whole, "--json").envelope["result"]["findings"] == []


def test_verify_of_a_damaged_log_is_status_4_and_names_file_positions_and_tables(
    capsys: pytest.CaptureFixture[str], whole: Path
) -> None:
    broken = next((whole.parent / "log" / "changes").glob("segment=3/*.parquet"))
    broken.write_bytes(broken.read_bytes()[:-1])
    outcome = run(capsys, "log", "verify", "-c", whole)
    assert outcome.status == 4
    assert f"changes/segment=3/{broken.name}" in outcome.output
    assert "positions 0/78 to 0/78; tables shop.orders" in outcome.output
    assert "→" in outcome.output
    told = run(capsys, "log", "verify", "-c", whole, "--json")
    assert told.status == 4
    assert (told.envelope["ok"], told.envelope["error"]["code"]) == (False, "CDC-6002")
    (found,) = told.envelope["result"]["findings"]
    assert (found["damage"], found["first"], found["tables"]) == ("size", "0/78", ["shop.orders"])
    assert run(capsys, "log", "verify", "--tables", "items", "-c", whole).status == 4
    assert run(capsys, "log", "verify", "--source", "-c", whole).status == 3
