"""Data files of executors: what the driver must see of them before a commit names them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest

from cdc.errors import ExecutorFilesUnusable
from pipelines.sinks.delta.executor_files import PartFiles, check_visible
from pipelines.sinks.delta.new_data_files import DataFile, TargetFolder
from tests.fixtures.moved_clock import MovedClock

WRITES: Final = """
import sys, time
from pathlib import Path
from tests.pipelines.sinks.delta.test_executor_files import write
Path(sys.argv[1], "clock").write_text(str(time.time()))
Path(sys.argv[1], "file.json").write_text(write(sys.argv[1]))
"""
DECADE: Final = 315_576_000


def write(folder: str) -> str:
    """As a task does: write a data file, and return what the driver gets of it."""
    file = PartFiles(TargetFolder(folder, ("id", "at")))
    file.add(pa.table({"id": [1, 2], "at": pa.array([10, None], pa.timestamp("us"))}))
    (returned,) = (row for batch in file.close() for row in batch.to_pylist())
    return json.dumps(returned)


def test_a_file_that_only_the_executor_sees_is_not_committed(tmp_path: Path) -> None:
    folder, shared = TargetFolder(str(tmp_path), ()), tmp_path / "shared.parquet"
    shared.write_bytes(b"1234")
    files = [DataFile("shared.parquet", 4, 1, "{}"), DataFile("elsewhere.parquet", 4, 1, "{}")]

    check_visible(folder, files[:1])
    with pytest.raises(ExecutorFilesUnusable, match="does not see it"):
        check_visible(folder, files)


def test_an_executor_without_the_directory_says_so(tmp_path: Path) -> None:
    file = PartFiles(TargetFolder(f"{tmp_path}/missing", ()))
    file.add(pa.table({"id": [1]}))
    with pytest.raises(ExecutorFilesUnusable, match=r"the executor on .* cannot write .*: .*no such file"):
        list(file.close())


def test_a_file_of_an_executor_whose_clock_is_ahead_is_the_same(tmp_path: Path, moved_clock: MovedClock) -> None:
    ours = DataFile(**json.loads(write(str(tmp_path))))
    moved_clock.run(DECADE, "-c", WRITES, tmp_path)
    theirs = DataFile(**json.loads((tmp_path / "file.json").read_text()))

    assert float((tmp_path / "clock").read_text()) > (tmp_path / "clock").stat().st_mtime + DECADE / 2
    assert asdict(replace(theirs, name="")) == asdict(replace(ours, name=""))
    assert theirs.add_action().modification_time <= ours.add_action().modification_time  # by the clock of the driver
    assert (tmp_path / theirs.name).read_bytes() == (tmp_path / ours.name).read_bytes()
