"""No other account of the machine can read the demo's files or connect to its database."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cdc.postgres.embedded_server import find_binaries
from tests.fixtures.private import open_to_others, under_umask
from tests.fixtures.waiting import until

PSQL = re.compile(r"psql '(postgresql://[^']+)'")
DEADLINE = 240


@contextmanager
def demo(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A demo that runs, and the file of what it prints; it is ended if it has not ended by itself."""
    printed, command = folder / "printed", [sys.executable, "-m", "cdc", "demo", "--no-spark", "--port", "0", *options]
    with printed.open("wb") as output:
        running = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(folder)}
        )
    try:
        yield running, printed
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGINT)
        running.wait(DEADLINE)


@contextmanager
def captured(folder: Path, umask: int) -> Iterator[Path]:
    """What a demo that has ended leaves, in a block under the umask of the demo; its psql line was checked."""
    state = folder / ".cdc-demo"
    with under_umask(umask):
        with demo(folder, "--seconds", "60", "--keep") as (running, printed):
            until(
                lambda: "✓ shop" in printed.read_text() or running.poll() is not None,
                printed.read_text,
                seconds=DEADLINE,
            )
            check_psql_line(PSQL.search(printed.read_text())[0])  # type: ignore[index]
            assert socket.socket().connect_ex(("127.0.0.1", 54329)) != 0
            until(lambda: list(state.glob("log/changes/**/*.parquet")), printed.read_text, seconds=DEADLINE)
        yield state


@pytest.mark.slow
def test_the_printed_psql_line_and_what_the_capture_writes_are_for_the_own_account_only(folder: Path) -> None:
    """Log, catalog, checkpoints, spool, output of processes."""
    with captured(folder, 0o000) as state:
        assert open_to_others(state) == []


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o000, 0o022], ids=oct)
def test_the_printed_psql_line_and_every_file_are_for_the_own_account_only(folder: Path, umask: int) -> None:
    """As above; then a Delta target and a search index, by Spark."""
    with captured(folder, umask) as state:
        assert open_to_others(state) == []
        command = [sys.executable, "-m", "pipelines", "apply", "--once", "-c", str(state / "shop.yaml")]
        applied = subprocess.run(command, cwd=state, capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert applied.returncode == 0, applied.stderr
    assert list(state.glob("lake/shop/*/*.parquet"))
    assert list(state.glob("search/**/meta.json"))
    assert open_to_others(state) == []


def check_psql_line(printed: str) -> None:
    """It reaches the database when it is copied to a shell of this account, and not from another account."""
    environment = {**os.environ, "PATH": f"{find_binaries(18)}:{os.environ['PATH']}", "PGPORT": "1"}
    line = f"{printed} -Atc 'SELECT count(*) > 0 FROM shop.orders'"
    ours = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert (ours.stdout, ours.stderr) == ("t\n", "")
    if os.geteuid() == 0:
        theirs = subprocess.run(
            line, shell=True, env=environment, capture_output=True, text=True, user="nobody", cwd="/", check=False
        )
        assert theirs.returncode != 0
        assert "Permission denied" in theirs.stderr
