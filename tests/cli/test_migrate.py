"""cdc migrate: forward, back, and what would be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.catalog.revision import HEAD
from tests.cli.command import run
from tests.cli.whole_log import whole_log_definition
from tests.config.definitions import SOUND, write


def test_forward_and_back_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    assert run(capsys, "migrate", "status", "-c", path, "--json").envelope["result"] == {"current": None, "head": HEAD}
    assert run(capsys, "migrate", "up", "-c", path).output == f"✓ migrated the catalog from no revision to {HEAD}\n"
    assert "up to date" in run(capsys, "migrate", "status", "-c", path).output
    envelope = run(capsys, "migrate", "down", "--yes", "-c", path, "--json").envelope
    assert envelope["result"] == {"before": HEAD, "after": None}


def test_going_back_asks_for_a_yes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    run(capsys, "migrate", "up", "-c", path)
    outcome = run(capsys, "migrate", "down", "-c", path)
    assert outcome.status == 2
    assert "--yes" in outcome.errors
    assert "up to date" in run(capsys, "migrate", "status", "-c", path).output


def test_the_statements_are_printed_and_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "migrate", "sql", "-c", write(tmp_path))
    assert "CREATE TABLE pipelines" in outcome.output
    assert not (tmp_path / "catalog.db").exists()


def test_an_unreachable_catalog_is_status_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "postgresql+psycopg://u@127.0.0.1:1/d?connect_timeout=2"
    path = write(tmp_path, SOUND + f"catalog: {{url: '{url}'}}\n")
    outcome = run(capsys, "migrate", "status", "-c", path, "--json")
    assert outcome.status == 3
    assert outcome.envelope["error"]["code"] == "CDC-5001"


@pytest.fixture(name="whole")
def _whole(tmp_path: Path) -> Path:
    return whole_log_definition(tmp_path)


def test_a_log_of_this_format_is_not_migrated(capsys: pytest.CaptureFixture[str], whole: Path) -> None:
    assert run(capsys, "migrate", "log", "-c", whole).output == "✓ the log already has format 3\n"
