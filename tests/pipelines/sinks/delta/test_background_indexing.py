"""Background indexing: batches are exact while a thread reads the keys of a target, and it continues after a crash."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from structlog.testing import capture_logs

from cdc.failpoint import VARIABLE
from pipelines.sinks.delta.background_indexing import IndexingThread
from tests.fixtures import forked
from tests.fixtures.waiting import until
from tests.pipelines.sinks.delta import rebuild_driver
from tests.pipelines.sinks.delta.rebuild_driver import FILES
from tests.pipelines.sinks.delta.vector_tables import COLUMNS, VectorTable, delete, rows_in, upsert


@dataclass
class Rebuilt:
    """A table with FILES files of five rows, without an index; its thread reads a file at a time, when it may."""

    mine: VectorTable
    may_read: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        rebuild_driver.fill(self.mine.uri)
        self.mine.thread = partial(IndexingThread, at_once=0, group_rows=1, begin=self.may_read.wait)
        self.open_without_index()

    def open_without_index(self) -> None:
        """Open the table as a driver on another machine does."""
        self.close()
        shutil.rmtree(self.mine.index_folder, ignore_errors=True)
        self.mine.table = self.mine.open()

    def read_all(self) -> None:
        """Let the thread read the keys of all files."""
        self.may_read.set()
        until(lambda: not self.mine.table.waiting_files, "the keys of all files", every=0.001)

    def close(self) -> None:
        """Close the table."""
        self.may_read.set()
        self.mine.close()
        self.may_read.clear()

    def items(self) -> dict[int, str]:
        """Return id → item of the rows."""
        return {row["id"]: row["item"] for row in self.mine.rows()}


@pytest.fixture(name="rebuilt")
def _rebuilt(tmp_path: Path) -> Iterator[Rebuilt]:
    rebuilt = Rebuilt(VectorTable(str(tmp_path / "target")))
    yield rebuilt
    rebuilt.close()


def test_batches_are_exact_while_the_keys_wait_for_the_thread_and_then_need_no_data_file(rebuilt: Rebuilt) -> None:
    mine, expected = rebuilt.mine, rebuilt.items()
    mine.merge(upsert(100, id=3, item="new"), delete(100, 1, id=12), upsert(100, 2, id=99, item="99"))
    assert mine.table.waiting_files == FILES
    del expected[12]
    assert rebuilt.items() == expected | {3: "new", 99: "99"}

    rebuilt.read_all()
    mine.table.index_new_files()
    assert {*mine.table.index.files} == {*mine.table.files.by_path}
    for path in mine.table.files.by_path:
        Path(mine.uri, path).write_bytes(b"")  # their statistics say that they have no later rows
    mine.merge(upsert(200, id=3, item="newer"), upsert(200, 1, id=19, item="last"))
    deleted = sum(len(file.deleted) for file in mine.files().by_path.values())
    assert deleted == 4  # the rows 12 and 19, and both earlier rows 3


def test_a_file_whose_statistics_exclude_all_keys_is_not_read(rebuilt: Rebuilt) -> None:
    last = max(rebuilt.mine.table.files.by_path.values(), key=lambda file: file.greatest("id"))
    Path(rebuilt.mine.uri, last.path).write_bytes(b"")
    rebuilt.mine.merge(upsert(100, id=3, item="new"))
    with pytest.raises(pa.ArrowInvalid):
        rebuilt.mine.merge(upsert(200, id=last.greatest("id"), item="newer"))


def test_a_file_that_left_the_table_while_it_waited_does_not_stop_the_others(rebuilt: Rebuilt) -> None:
    rebuilt.mine.merge(upsert(100, id=3, item="new"))
    other, expected = DeltaTable(rebuilt.mine.uri), rebuilt.items()
    other.optimize.compact()
    other.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with capture_logs() as logs:
        rebuilt.read_all()
        rebuilt.mine.merge(upsert(200, id=4, item="newer"))
        rebuilt.read_all()
        rebuilt.mine.merge(upsert(300, id=19, item="newest"))
    assert rebuilt.items() == expected | {4: "newer", 19: "newest"}
    assert {line["event"] for line in logs} <= {"the keys of data files could not be read in the background"}
    assert {*rebuilt.mine.table.index.files} == {*rebuilt.mine.table.files.by_path}


def test_a_background_rewrite_of_a_file_that_waits_is_exact(rebuilt: Rebuilt) -> None:
    mine, expected = rebuilt.mine, rebuilt.items()
    mine.merge(upsert(100, id=3, item="new"))
    files = [*mine.table.files.by_path.values()]
    done = mine.table.rewrite(files, COLUMNS.names, mine.described, lambda _copied: None)
    mine.merge(delete(200, id=7))
    assert mine.table.commit_rewrite(done, {})
    mine.merge(upsert(300, id=8, item="newest"))
    del expected[7]
    assert rebuilt.items() == expected | {3: "new", 8: "newest"}


def test_a_killed_driver_has_saved_the_keys_that_it_read(rebuilt: Rebuilt, tmp_path: Path) -> None:
    mine = rebuilt.mine
    mine.merge(upsert(100, id=3, item="new"))
    rebuilt.read_all()
    mine.merge(upsert(200, id=4, item="newer"))
    mine.table.index._end_merge()  # the merge of runs that may run saves the index, too
    shutil.copytree(mine.index_folder, tmp_path / "copy")
    rebuilt.close()
    shutil.rmtree(mine.index_folder)
    (tmp_path / "copy").rename(mine.index_folder)
    mine.table = mine.open()
    assert len(mine.table.index.files) >= FILES - 1


FAILPOINTS = [
    "delta_index_group_prepared",
    "delta_index_group_prepared:3",
    "delta_index_group_added",
    "delta_indexed_after_files:2",
    "delta_index_group_added:3",
    "delta_indexed_after_commit:2",
    "delta_indexed_after_index:2",
]


def test_drivers_that_are_killed_while_the_index_is_built_leave_the_rows_of_their_batches(tmp_path: Path) -> None:
    uri = str(tmp_path / "target")
    VectorTable(uri).close()
    rebuild_driver.fill(uri)
    for failpoint in FAILPOINTS:
        shutil.rmtree(f"{uri}.index", ignore_errors=True)
        ended = forked.run("tests.pipelines.sinks.delta.rebuild_driver", uri, environment={VARIABLE: failpoint})
        assert ended.status == -signal.SIGKILL, f"{failpoint}\n{ended.errors}"
        assert rows_in(uri) == rebuild_driver.expected(uri), failpoint
    ended = forked.run("tests.pipelines.sinks.delta.rebuild_driver", uri)
    assert ended.status == 0, ended.errors
    assert rows_in(uri) == rebuild_driver.expected(uri)
