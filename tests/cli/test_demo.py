"""`cdc demo`: an embedded Postgres that cdc does not have is refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import run


def test_an_unknown_version_of_postgres_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(capsys, "demo", "--pg", "14")
    assert (outcome.status, "--pg 14 is not supported: expected 16 or 18" in outcome.errors) == (2, True)
    assert list(tmp_path.iterdir()) == []
