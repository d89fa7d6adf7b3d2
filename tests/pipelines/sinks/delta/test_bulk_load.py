"""Bulk load: files that executors wrote become the rows of an empty target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc.config import SinkRule
from cdc.targets.lake_reader import read_target
from pipelines.sinks.contract import TargetState
from pipelines.sinks.delta.new_data_files import DataFile, TargetFolder, statistics
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, batch, folded, put
from tests.fixtures.s3 import S3

LOADED = batch(None, 0, 20, generation=5)


@pytest.fixture(name="sink", params=["directory", "bucket"])
def _sink(
    tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[DeltaSink]:
    for name, text in s3.variables().items():
        monkeypatch.setenv(name, text)
    lake = s3.root() if request.param == "bucket" else tmp_path
    sink = DeltaSink(DeltaSettings("lake", f"{lake}/{{schema}}/{{table}}"))
    sink.open("log-1")
    yield sink
    sink.close()


def written_file(folder: TargetFolder, rows: pa.Table) -> DataFile:
    """A file of the directory, as an executor writes and describes it."""
    pq.write_table(rows, "rows.parquet", filesystem=folder.file_system)
    size = folder.file_system.get_file_info("rows.parquet").size
    return DataFile("rows.parquet", size, rows.num_rows, statistics(rows, folder.statistics_columns))


def test_adopted_files_are_the_rows_of_a_complete_target(sink: DeltaSink) -> None:
    load = sink.bulk_load()
    folder = load.folder(ORDERS)
    assert folder is not None
    rows = sink.parts.targets.shape(ORDERS).rows(folded([put(1, "a", 10), put(2, "b", 11)]))
    record = load.adopt(LOADED, [written_file(folder, rows)])

    assert (record.position, record.state) == (20, TargetState.STREAMING)
    assert sorted(read_target(record.target).read_all()["item"].to_pylist()) == ["a", "b"]
    later = sink.apply(batch([put(2, "B", 30)], 20, 40))
    assert sorted(read_target(later.target).read_all()["item"].to_pylist()) == ["B", "a"]


def test_a_table_without_rows_is_complete_too(sink: DeltaSink) -> None:
    record = sink.bulk_load().adopt(LOADED, [])

    assert (record.position, record.state) == (20, TargetState.STREAMING)
    assert read_target(record.target).read_all().num_rows == 0


@pytest.mark.parametrize(
    "settings",
    [
        DeltaSettings("lake", "", Writer.SPARK),
        DeltaSettings("lake", "", rules=(SinkRule(match="*.*", partition_by=("item",)),)),
    ],
    ids=["writer spark", "partitions"],
)
def test_some_targets_are_written_by_spark_itself(tmp_path: Path, settings: DeltaSettings) -> None:
    sink = DeltaSink(replace(settings, path=f"{tmp_path}/{{schema}}/{{table}}"))
    sink.parts.targets.log_id = "log-1"

    assert sink.bulk_load().folder(ORDERS) is None
