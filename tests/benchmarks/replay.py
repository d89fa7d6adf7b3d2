"""Replay: a table's rows from a log that is compacted and trimmed meanwhile into a new Delta table.

The old target is what the apply process made of the same log before. The new one has to hold the same rows, with all
columns and with their places in the log.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from cdc.log.reader import LogReader
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import ReaderPlace, until

SINK: Final = "lake"
SEGMENTS: Final = 24
"""Of the log, about: each can be compacted and trimmed by itself."""
ROW_BYTES: Final = 60
"""Of the log's files for each row of the table, about."""
TIMEOUT: Final = 900.0
"""Seconds of one process."""


def figures() -> dict[str, Figure]:
    """What is measured here."""
    return {
        "replay_vs_spark": Figure("ratio", at_least=0.4),
        "rows_differing.replay": Figure("rows", at_most=0, in_every_run=True),
        "replay_rows_per_second": Figure("rows/s"),
        "spark_rows_per_second": Figure("rows/s"),
        "replay_compacted_rows": Figure("rows"),
        "replay_trimmed_segments": Figure("segments"),
    }


def log_settings(rows: int) -> str:
    """Lines of a definition's `log`: many segments, of which one goes as soon as it is compacted, its files later."""
    size = max(1 << 16, rows * ROW_BYTES // SEGMENTS)
    return f"  segment: {{bytes: {size}}}\n  retain: {{max: 1s, grace: 1h}}"


def measured(place: ReaderPlace, topic: str, rows: int) -> dict[str, float]:
    """The figures of one replay of a table with so many rows; the reader has copied it, and runs."""
    config, folder = place.write(), place.folder
    _apply(config, folder)
    with _upkept(place.log, folder / "begun"):
        built = spark_job("replay", config, SINK, folder / "new", folder / "begun")
    if not (built["compacted_rows"] and built["trimmed_segments"]):
        raise RuntimeError(f"nothing was compacted or nothing trimmed beside the replay: {built}")
    plain = spark_job("rewrite", built["target"], folder / "plain")
    compared = spark_job("compare", "/".join((str(folder), SINK, *topic.split("."))), built["target"])
    if not built["rows"] == plain["rows"] == compared["rows"] == rows:
        raise RuntimeError(f"not all of {rows:,} rows: {built}, {plain}, {compared}")
    return {
        "replay_vs_spark": plain["seconds"] / built["seconds"],
        "rows_differing.replay": compared["differing"],
        "replay_rows_per_second": rows / built["seconds"],
        "spark_rows_per_second": rows / plain["seconds"],
        "replay_compacted_rows": built["compacted_rows"],
        "replay_trimmed_segments": built["trimmed_segments"],
    }


def spark_job(job: str, *arguments: object) -> dict[str, Any]:
    """What a job of spark_jobs prints."""
    command = [sys.executable, "-m", "tests.benchmarks.spark_jobs", job, *map(str, arguments)]
    done = subprocess.run(command, check=True, timeout=TIMEOUT, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _apply(config: Path, folder: Path) -> None:
    """Bring the sink to the end of the log, as the service does it."""
    command = [sys.executable, "-m", "pipelines", "apply", "-c", str(config), "--trigger", "once"]
    with (folder / "apply.out").open("wb") as output:
        done = subprocess.run(command, check=False, timeout=TIMEOUT, stdout=output, stderr=output)
    if done.returncode:
        print((folder / "apply.out").read_text(encoding="utf-8")[-3000:], file=sys.stderr)
        raise RuntimeError(f"apply ended with status {done.returncode}")


@contextmanager
def _upkept(log: Path, begun: Path) -> Iterator[None]:
    """The log is compacted and trimmed beside the block, from when `begun` is there; some of it is so before."""
    with subprocess.Popen([sys.executable, "-m", "tests.benchmarks.upkeep", str(log), str(begun)]) as process:

        def runs() -> bool:
            if status := process.poll():
                raise RuntimeError(f"upkeep ended with status {status}")
            return True

        try:
            until(lambda: runs() and LogReader(log).oldest > 0, TIMEOUT)
            yield
            runs()
        finally:  # killed anywhere, it leaves a whole log
            process.kill()
