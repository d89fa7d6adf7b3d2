"""Contents of a log: files of a segment and of a run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from cdc.errors import UnknownName
from cdc.log.reader import LogReader
from cdc.service.log_contents import files_of_run, files_of_segment, open_log, tables_by_topic
from cdc.service.log_status_reader import log_status
from tests.cli.trimmed import Folder
from tests.service.pipeline import TABLES, copy_log


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A log that is compacted up to 170 and lacks single changes up to 150, deletes up to 120."""
    folder = Folder(tmp_path)
    folder.compacted(160)
    folder.compacted(170, floor=120)
    folder.trimmed()
    return folder


def test_files_of_a_segment_and_of_a_run_are_listed_and_others_are_unknown(folder: Folder) -> None:
    log = LogReader(folder.root)
    (file,) = files_of_segment(log, 6)
    assert (file.rows, file.first, Path(file.path).exists()) == (2, "0/A0", True)
    (run,) = log_status(folder.root, log, datetime.now(UTC)).runs
    assert sum(file.rows for file in files_of_run(folder.root, log, run.run)) == run.rows == 3
    for unknown in (lambda: files_of_segment(log, 0), lambda: files_of_run(folder.root, log, 99)):
        with pytest.raises(UnknownName):
            unknown()


def test_tables_of_a_log_are_found_by_topic_and_without_a_log_there_are_none(tmp_path: Path) -> None:
    assert tables_by_topic(tmp_path / "log") == {}
    copy_log(tmp_path)
    assert set(tables_by_topic(tmp_path / "log")) == set(TABLES)


def test_an_open_log_is_refreshed(folder: Folder) -> None:
    log = open_log(folder.root)
    folder.append(300)
    assert open_log(folder.root, log) is log
    assert str(log.durable) == "0/12C"
