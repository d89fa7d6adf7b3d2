"""Failpoints: inactive without the variable, and active at the requested pass."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from cdc import failpoint


def test_a_failpoint_is_inactive_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(failpoint.VARIABLE, raising=False)
    failpoint.hit("nowhere")
    monkeypatch.setenv(failpoint.VARIABLE, "elsewhere")
    failpoint.hit("nowhere")


def test_a_failpoint_interrupts_at_the_requested_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoint.VARIABLE, "third_pass:3:abandon")
    failpoint.hit("third_pass")
    failpoint.hit("third_pass")
    with pytest.raises(failpoint.Abandoned):
        failpoint.hit("third_pass")


def test_a_failpoint_kills_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "from cdc.failpoint import hit; hit('now'); print('alive')"],
        env={failpoint.VARIABLE: "now"},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")
