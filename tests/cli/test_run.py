"""`cdc run` starts nothing if the definition is invalid or would expose the service."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_the_server_leaves_the_processor_to_the_other_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cdc", "server", "-c", str(write(tmp_path, SOUND + "service: {port: 0}\n"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            assert any("accepts requests" in line for line in process.stdout)
            assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)
        finally:
            process.terminate()
