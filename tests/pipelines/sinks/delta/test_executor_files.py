"""Data files of executors: what the driver must see of them before a commit names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.errors import SinkUnavailable
from pipelines.sinks.delta.executor_files import check_visible
from pipelines.sinks.delta.new_data_files import DataFile, TargetFolder


def test_a_file_that_only_the_executor_sees_is_not_committed(tmp_path: Path) -> None:
    folder, shared = TargetFolder(str(tmp_path), ()), tmp_path / "shared.parquet"
    shared.write_bytes(b"1234")
    files = [DataFile("shared.parquet", 4, 1, "{}"), DataFile("elsewhere.parquet", 4, 1, "{}")]

    check_visible(folder, files[:1])
    with pytest.raises(SinkUnavailable, match="does not see it"):
        check_visible(folder, files)
