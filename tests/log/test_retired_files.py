"""Records of removed files: read as written, never outside the log, and counted from when a vacuum saw them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.boot_clock import SECOND, BootTimestamp
from cdc.errors import LogCorrupt
from cdc.log.retired_files import (
    FOLDER,
    RemovedFiles,
    list_removals,
    record_removal,
    segments_with_removed_files,
)

NOW = BootTimestamp(100 * SECOND, "boot", 50 * SECOND)


def test_a_removal_is_recorded_before_its_commit_and_read_again(tmp_path: Path) -> None:
    record_removal(tmp_path, "changes", {"segment=1/a.parquet": 3, "segment=2/b.parquet": 4}, 7)
    record_removal(tmp_path, "changes", {}, 8)
    (record,) = list_removals(tmp_path).values()
    assert (record.version, set(record.paths), record.size) == (7, {"segment=1/a.parquet", "segment=2/b.parquet"}, 7)
    assert segments_with_removed_files(tmp_path, "changes") == {1, 2}
    assert segments_with_removed_files(tmp_path, "compacted") == set()


def test_the_age_counts_from_the_vacuum_that_saw_the_files_removed() -> None:
    record = RemovedFiles("changes", 7, ("segment=1/a.parquet",))
    later = BootTimestamp(999 * SECOND, "boot", 55 * SECOND)
    assert record.age_us(later) == 0
    assert record.seen(NOW).age_us(later) == 5 * SECOND


@pytest.mark.parametrize(("table", "path"), [("changes", "../a.parquet"), ("elsewhere", "segment=1/a.parquet")])
def test_a_record_names_only_data_files_of_the_log(table: str, path: str) -> None:
    with pytest.raises(ValueError, match="is invalid: expected a table of the log and its data files"):
        RemovedFiles(table, 1, (path,))


def test_a_damaged_record_is_an_error_and_a_missing_one_is_none(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "a.json").write_text("{")
    with pytest.raises(LogCorrupt, match=r"a\.json"):
        list_removals(tmp_path)
    assert RemovedFiles.read(tmp_path / "missing.json") is None
