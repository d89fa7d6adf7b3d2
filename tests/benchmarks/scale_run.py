"""One run of the apply process over a log that waits, and what it cost: seconds, memory and bytes of its driver."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from cdc.config import EngineChoice
from cdc.targets.lake_reader import read_target
from pipelines.runtime.spark_session import SparkSettings, delta_jars
from tests.benchmarks.apply_input import Changes

CONF: Final = {
    "spark.driver.memory": "512m",
    "spark.driver.maxResultSize": "64m",
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "2g",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
}
SAMPLE: Final = 0.05
"""Seconds between two looks at the processes of a driver."""
TIMEOUT: Final = 3600.0
"""Seconds of one run."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the changes are applied: with which master, and by which engine."""

    master: str
    engine: EngineChoice


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run cost."""

    seconds: float
    """From the start of the process to its exit, so with the start of its JVMs."""
    driver_mib: float
    """Peak memory of the driver: its Python process and its JVM, each at its own peak."""
    result_bytes: int
    """Bytes of the results that tasks sent to the driver."""
    bytes_read: int
    """Bytes that the Python process of the driver read from files, its modules among them."""


@dataclass(slots=True)
class Driver:
    """The processes of a running driver, and the last figures that the kernel had of each."""

    pid: int
    peaks: dict[int, float] = field(default_factory=dict)
    bytes_read: int = 0

    @property
    def peak_mib(self) -> float:
        """Peak memory of the Python process and of its JVM, each at its own peak."""
        return sum(self.peaks.values())

    def look(self) -> None:
        """Take the figures of the kernel; those of a process that has ended stay as they were."""
        for pid in (self.pid, *_java_children(self.pid)):
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
                peak = sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
                self.peaks[pid] = max(peak, self.peaks.get(pid, 0.0))
        with suppress(OSError):
            lines = Path(f"/proc/{self.pid}/io").read_text(encoding="ascii").splitlines()
            self.bytes_read = int(next(line for line in lines if line.startswith("rchar")).split()[1])


def apply_waiting(folder: Path, log: Path, way: Way) -> Cost:
    """Apply a log to a new lake in a folder, cold, and return the cost. Raises RuntimeError if the process fails."""
    seconds, driver = run_apply_once(folder, write_definition(folder, log, way))
    results = sum(event["Task Metrics"]["Result Size"] for event in _task_ends(folder / "events"))
    return Cost(seconds, driver.peak_mib, results, driver.bytes_read)


def run_apply_once(folder: Path, definition: Path) -> tuple[float, Driver]:
    """Run an apply process until all that waits is applied; return the seconds, and what its processes needed.

    Its output is in a file of the folder. Raises RuntimeError if the process fails.
    """
    command = [sys.executable, "-m", "pipelines", "apply", "-c", str(definition), "--trigger", "once"]
    with (folder / "apply.out").open("wb") as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output)
        driver = Driver(process.pid)
        try:
            while process.poll() is None:
                driver.look()
                if time.perf_counter() - began > TIMEOUT:
                    raise RuntimeError(f"not done after {TIMEOUT:.0f} s: {last_lines(folder)}")
                time.sleep(SAMPLE)
        finally:
            process.kill()
            process.wait()
    seconds = time.perf_counter() - began
    if process.returncode:
        raise RuntimeError(f"apply ended with status {process.returncode}: {last_lines(folder)}")
    return seconds, driver


def check_rows(folder: Path, changes: Changes) -> None:
    """Raise RuntimeError if the lake of a folder does not have exactly the rows that all changes leave."""
    final = changes.final(len(changes))
    ids: list[np.ndarray] = []
    for batch in read_target(f"{folder}/lake/shop/items"):
        ids.append(batch["id"].to_numpy())
        expected = final.rows(ids[-1])
        if not pa.table(batch).select(expected.column_names).cast(expected.schema).equals(expected):
            raise RuntimeError(f"the lake differs from the changes in one of {batch.num_rows:,} rows")
    present = np.sort(np.concatenate([np.empty(0, np.int64), *ids]))
    if not np.array_equal(present, final.ids):
        raise RuntimeError(f"the lake differs from the changes: {len(present):,} and {len(final.ids):,} rows")


def write_definition(folder: Path, log: Path, way: Way) -> Path:
    """Write the definition of a pipeline from a log to a new lake in a folder, and return its path."""
    (folder / "events").mkdir(parents=True)
    spark: dict[str, Any] = {
        "master": way.master,
        "engine": way.engine.value,
        "checkpoint": f"{folder}/checkpoint",
        "delta_jars": [str(jar) for jar in delta_jars(SparkSettings())],
        "conf": {**CONF, "spark.eventLog.dir": f"file://{folder}/events"},
    }
    definition: Mapping[str, Any] = {
        "name": "scale",
        "source": {"dsn": "postgresql://nobody@127.0.0.1/none"},
        "tables": [{"match": "shop.*"}],
        "log": {"path": str(log), "compact": {"every": "off"}},
        "sinks": [{"name": "lake", "type": "delta", "path": f"{folder}/lake/{{schema}}/{{table}}"}],
        "spark": spark,
        "catalog": {"url": f"sqlite:///{folder}/catalog.db"},
    }
    path = folder / "scale.yaml"
    path.write_text(json.dumps(definition), encoding="utf-8")  # JSON is YAML
    return path


def last_lines(folder: Path) -> str:
    """Return the end of what the process of a folder has printed."""
    return (folder / "apply.out").read_text(errors="replace")[-2000:]


def _task_ends(events: Path) -> Iterator[dict[str, Any]]:
    """Yield the end of each task from the event logs of a folder; a run without Spark has none."""
    for file in events.iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith('{"Event":"SparkListenerTaskEnd"'):
                event = json.loads(line)
                if event.get("Task Metrics"):  # a task that was lost has none
                    yield event


def _java_children(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text(encoding="ascii").split())
    return [child for child in children if _is_java(child)]


def _is_java(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink().name == "java"
    return False
