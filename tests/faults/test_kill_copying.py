"""kill -9 while a merge writes data files again: the next driver leaves the same rows, and each of them once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc.failpoint import VARIABLE
from tests.faults.copying_driver import ENDS, ITEMS, drive
from tests.fixtures import forked
from tests.pipelines.sinks.added_features import items_by_id

KILLED = -signal.SIGKILL
POINTS = [
    "delta_indexed_after_files:3",
    "delta_indexed_file_copied",
    "delta_indexed_before_commit:3",
    "delta_indexed_after_commit:3",
    "delta_indexed_after_index:3",
    "delta_indexed_file_copied:2",
    "delta_indexed_after_commit:4",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_driver_killed_while_it_copies_files_is_followed_by_one_that_ends_the_same(
    tmp_path: Path, point: str
) -> None:
    ended = forked.run("tests.faults.copying_driver", tmp_path, ENDS[-1], environment={VARIABLE: point})
    assert ended.status == KILLED, ended.errors
    record = drive(tmp_path, ENDS[-1])

    assert items_by_id(record.target) == ITEMS
    assert "deletionVectors" not in (DeltaTable(record.target).protocol().writer_features or ())
