"""Commits of targets: what must be on the disk before a published cut names them."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc import atomic_file
from cdc.atomic_file import SyncFailed
from cdc.targets.published_record import Published
from pipelines.sinks.delta.commit_sync import CommitSync, files_of_commits
from pipelines.sinks.delta.settings import Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import batch, gone, put
from tests.pipelines.sinks.added_features import LOG, filled_sink, items_by_id, sink_settings


@pytest.mark.parametrize("writer", [Writer.INDEXED, Writer.COPY_ON_WRITE])
def test_every_file_of_new_commits_and_every_directory_is_synced_once(tmp_path: Path, writer: Writer) -> None:
    sink, uri = filled_sink(tmp_path, writer)
    table, before = Path(uri), {*Path(uri).rglob("*")}
    record = sink.apply(batch([put(4, "d", 30), gone(1, 31)], 20, 40))
    published = Published(40, 0, {record.relation: record})
    new = {path for path in table.rglob("*") if path not in before and path.is_file()}
    unsynced = sink.parts.commits.unsynced(published.versions)

    assert len(new) == 3, "a data file and a commit, and one deletion vector or copy"
    assert {path for path in unsynced if path.is_file()} == new
    assert {path.parent for path in new} | {table} == {path for path in unsynced if path.is_dir()}
    sink.publish(published)
    assert sink.parts.commits.unsynced(published.versions) == set()
    again = DeltaSink(sink_settings(tmp_path, writer))
    again.open(LOG)
    assert again.parts.commits.unsynced(published.versions) == set()


def test_files_in_subdirectories_bring_every_directory_up_to_the_table(tmp_path: Path) -> None:
    table = tmp_path / "table"
    log = table / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{3:020d}.json").write_text(
        '{"commitInfo": {}}\n{"add": {"path": "a%20b=1/c=2/part.parquet", "size": 1}}\n'
        '{"cdc": {"path": "_change_data/c.parquet", "size": 1}}\n'
    )

    files = files_of_commits(table, 2, 5)
    assert {table / "a b=1" / "c=2" / "part.parquet", table / "_change_data" / "c.parquet"} <= files
    assert {table, log, table / "a b=1", table / "a b=1" / "c=2", table / "_change_data"} <= files


def test_a_table_in_an_object_store_needs_no_sync() -> None:
    assert CommitSync().unsynced({"s3://bucket/lake/table": 7}) == set()


def test_commits_whose_files_cannot_be_synced_are_withdrawn_and_merged_again(tmp_path: Path) -> None:
    sink, uri = filled_sink(tmp_path, Writer.INDEXED)
    record = sink.apply(batch([put(4, "d", 30)], 20, 40))
    sink.parts.commits.withdraw({uri: record.version or 0})
    sink.close()

    assert items_by_id(uri) == {1: "a", 2: "b", 3: "c"}
    again = DeltaSink(sink_settings(tmp_path, Writer.INDEXED))
    again.open(LOG)
    assert again.apply(batch([put(4, "d", 30)], 20, 40)).version == record.version
    assert items_by_id(uri) == {1: "a", 2: "b", 3: "c", 4: "d"}
    assert DeltaTable(uri).version() == record.version


def test_a_file_that_cannot_be_synced_is_an_error_and_one_that_is_gone_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    atomic_file.sync_all([tmp_path, tmp_path / "file", tmp_path / "gone"])
    with pytest.raises(SyncFailed):
        atomic_file.sync_all([tmp_path, tmp_path / "file" / "below"])
