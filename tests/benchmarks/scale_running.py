"""A backlog that arrives at a running apply process, and the seconds until it is published.

All of the log is on the disk, but only its first rows have commits in its Delta log. When the process has published
these rows, so when its JVMs, Python workers and streaming query run, the other commits appear one after the other.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.lake_reader import Lake
from tests.benchmarks.scale_run import TIMEOUT, Way, last_lines, write_definition

FIRST: Final = 3
"""Number of commits that the process finds: the one that creates the log, the schema, and the first rows."""
LOOK: Final = 0.1
"""Seconds between two looks at the published record."""


def seconds_to_publish_backlog(folder: Path, log: Path, way: Way) -> float:
    """Start the apply process with a new lake in a folder; return the seconds from the backlog to its publication.

    Raises RuntimeError if the process fails.
    """
    definition = write_definition(folder, log, way)
    command = [sys.executable, "-m", "pipelines", "apply", "-c", str(definition)]
    with backlog_aside(log, folder / "aside") as show_backlog, (folder / "apply.out").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _wait_until_published(process, folder, _durable(log))
            began = time.perf_counter()
            show_backlog()
            _wait_until_published(process, folder, _durable(log))
            seconds = time.perf_counter() - began
            process.send_signal(signal.SIGTERM)
            status = process.wait(TIMEOUT)
        finally:
            process.kill()
            process.wait()
    if status:
        raise RuntimeError(f"apply ended with status {status}: {last_lines(folder)}")
    return seconds


@contextmanager
def backlog_aside(log: Path, aside: Path) -> Iterator[Callable[[], None]]:
    """Move the later commits of a log to another directory on the same file system during the block.

    The yielded function moves them back, the oldest first. Raises RuntimeError if the log is without its first commits.
    """
    folder = log / "changes" / "_delta_log"
    commits = sorted(folder.glob("*.json"))
    if [int(commit.stem) for commit in commits] != list(range(len(commits))) or len(list(folder.iterdir())) != len(
        commits
    ):
        raise RuntimeError(f"{folder} has checkpoints: write the log in fewer commits")
    aside.mkdir()
    later = [commit.rename(aside / commit.name) for commit in commits[FIRST:]]

    def show() -> None:
        while later:
            later[0].rename(folder / later[0].name)
            later.pop(0)

    try:
        yield show
    finally:
        show()


def _durable(log: Path) -> Position:
    position = LogReader(log).durable
    if position is None:
        raise RuntimeError(f"{log} has no commit")
    return position


def _wait_until_published(process: subprocess.Popen[bytes], folder: Path, position: Position) -> None:
    lake, deadline = Lake.open(f"{folder}/lake/{{schema}}/{{table}}"), time.monotonic() + TIMEOUT
    while (published := lake.published()) is None or published.position < position:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"position {position} was not published: {last_lines(folder)}")
        time.sleep(LOOK)
