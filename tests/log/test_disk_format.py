"""Layout: what a commit, a description and the statistics of a file say is read as it was written."""

from __future__ import annotations

import json

import pytest

from cdc.errors import LogFormatUnknown
from cdc.log.disk_format import FORMAT, CommitInfo, CommitSource, LogIdentity, delta_statistics, format_of, segment_of
from cdc.lsn import Lsn
from cdc.position import Position
from tests.log.rows import row, table

COMMIT = CommitInfo(
    last=Position(40),
    committed_at=7,
    timeline=2,
    rows=3,
    transactions=1,
    system_id="7",
    publication=9,
    switch_point=Lsn(32),
)


def test_the_metadata_of_a_commit_is_read_as_it_was_written() -> None:
    assert CommitInfo.from_metadata(COMMIT.to_metadata()) == COMMIT
    assert COMMIT.commit_source == CommitSource(2, "7", 9, Lsn(32))


def test_a_commit_that_is_no_append_has_no_metadata_of_the_log() -> None:
    assert CommitInfo.from_metadata({"operation": "CREATE TABLE"}) is None


def test_commits_of_older_versions_name_neither_cluster_nor_publication() -> None:
    fields = {k: v for k, v in COMMIT.to_metadata().items() if k not in {"cdc.system_id", "cdc.publication"}}
    found = CommitInfo.from_metadata(fields)
    assert found is not None
    assert (found.system_id, found.publication) == ("", 0)


def test_the_identity_is_read_from_the_description() -> None:
    identity = LogIdentity(system_id="7000", database="shop")
    assert LogIdentity.from_description(identity.to_description()) == identity
    assert format_of(identity.to_description()) == FORMAT


@pytest.mark.parametrize("text", ["", "{}", '{"format": 0}', f'{{"format": {FORMAT + 1}}}', '{"format": "2"}'])
def test_another_format_is_refused(text: str) -> None:
    with pytest.raises(LogFormatUnknown):
        format_of(text)


def test_statistics_have_the_bounds_of_every_column_that_excludes_files() -> None:
    found = json.loads(delta_statistics(table(row(10), row(12, 1, partial=True), row(11, op="m", relation=None))))
    assert (found["numRecords"], found["nullCount"]["relation"]) == (3, 1)
    assert (found["minValues"]["position"], found["maxValues"]["position"]) == (10, 12)
    assert (found["minValues"]["partial"], found["maxValues"]["partial"]) == (False, True)
    assert found["minValues"]["committed_at"].endswith("Z")


def test_the_path_of_a_data_file_names_its_segment() -> None:
    assert segment_of("segment=12/x.parquet") == 12
