"""`cdc run` starts nothing if the definition is invalid or would expose the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import run
from tests.config.definitions import SOUND, write


def test_an_invalid_definition_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "run", "-c", write(tmp_path, SOUND + "sinkz: []\n"))
    assert (outcome.status, "unknown key" in outcome.errors) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shop.yaml"]


@pytest.mark.parametrize("command", [["run"], ["run", "--only", "server"]])
def test_a_public_address_without_a_token_starts_nothing(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(capsys, *command, "-c", write(tmp_path, SOUND + "service: {host: 0.0.0.0}\n"))
    assert (outcome.status, "CDC-5018" in outcome.errors) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shop.yaml"]


def test_an_unknown_process_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "run", "--only", "writer").status == 2
