"""Data files of executors: what the driver must see of them before a commit names them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from cdc.errors import ExecutorFilesUnusable
from pipelines.sinks.delta.executor_files import PartFiles, check_visible
from pipelines.sinks.delta.new_data_files import DataFile, TargetFolder


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
