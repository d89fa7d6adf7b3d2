"""`cdc run` starts nothing if the definition is invalid or would expose the service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cdc.failpoint import VARIABLE
from tests.cli.command import run
from tests.config.definitions import SOUND, write
from tests.fixtures.waiting import PATIENCE, until


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


@contextmanager
def server_in(folder: Path, failpoint: str = "") -> Iterator[subprocess.Popen[str]]:
    """A server process, which is killed in the end."""
    command = [sys.executable, "-m", "cdc", "server", "-c", str(write(folder, SOUND + "service: {port: 0}\n"))]
    environment = os.environ | {VARIABLE: failpoint}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_server_leaves_the_processor_to_the_other_processes(tmp_path: Path) -> None:
    with server_in(tmp_path) as process:
        assert process.stdout is not None
        assert any("accepts requests" in line for line in process.stdout)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)


def test_a_server_in_the_process_of_its_caller_leaves_the_priority_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)

    assert run(capsys, "server", "-c", write(tmp_path, SOUND + "service: {host: 0.0.0.0}\n")).status == 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_that_arrives_before_the_server_serves_ends_it(number: signal.Signals, tmp_path: Path) -> None:
    with server_in(tmp_path, "before_serve:1:stop") as process:
        status = Path(f"/proc/{process.pid}/status")
        until(lambda: "State:\tT" in status.read_text(), "the server to reach the failpoint")
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)

        assert process.wait(PATIENCE) == 0
