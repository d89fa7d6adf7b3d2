"""Path ownership: which paths a sink of a log may write to."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc.config import DeltaSinkDefinition
from cdc.errors import TargetUnusable
from cdc.targets.path_ownership import LOG_ID, STAGED, check_free, check_owner, check_path, is_begun
from cdc.targets.published_record import Published
from pipelines.sinks.delta.published_cuts_table import PublishedTable


def table_of_log(uri: str, log_id: str) -> None:
    """An empty Delta table that says which log fills it."""
    properties = {LOG_ID: log_id}
    DeltaTable.create(uri, pa.schema([("id", pa.int64())]), configuration=properties, raise_if_key_not_exists=False)


def test_a_missing_or_empty_directory_is_free(tmp_path: Path) -> None:
    check_path(f"{tmp_path}/new", "log-1")
    check_path(str(tmp_path), None)


def test_hidden_files_and_those_of_a_replay_do_not_count(tmp_path: Path) -> None:
    for name in (".hidden", "_started", f"{STAGED}1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    check_free(str(tmp_path))
    (tmp_path / "theirs.csv").touch()

    with pytest.raises(TargetUnusable, match=r"neither a Delta table nor empty: it contains 'theirs.csv'"):
        check_path(str(tmp_path), "log-1")


def test_a_file_is_no_path_of_a_target(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(TargetUnusable, match="is a file: expected a directory"):
        check_path(str(file), "log-1")


def test_a_target_belongs_to_the_log_that_it_names(tmp_path: Path) -> None:
    uri = str(tmp_path / "target")
    table_of_log(uri, "log-1")
    check_path(uri, "log-1")

    with pytest.raises(TargetUnusable, match="was written from log 'log-1': expected 'log-2'"):
        check_path(uri, "log-2")
    with pytest.raises(TargetUnusable, match="this pipeline has no log yet"):
        check_path(uri, None)


def test_a_table_of_another_program_names_no_log(tmp_path: Path) -> None:
    uri = str(tmp_path / "theirs")
    write_deltalake(uri, pa.table({"id": [1]}))

    with pytest.raises(TargetUnusable, match="was not created by cdc"):
        check_path(uri, "log-1")
    with pytest.raises(TargetUnusable, match=f"no property '{LOG_ID}'"):
        check_owner(uri, None, "log-1")


def test_a_sink_is_begun_once_it_published(tmp_path: Path) -> None:
    sink = DeltaSinkDefinition(type="delta", name="lake", path=f"{tmp_path}/{{schema}}/{{table}}")
    assert not is_begun(sink)
    PublishedTable.open(f"{tmp_path}/_cdc/published", "log-1").write(Published(10, 0, {}))

    assert is_begun(sink)
