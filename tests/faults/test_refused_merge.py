"""A merge that was announced and never made: what it would have taken out stays until the one that did is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.log import retired_files
from cdc.log.compacted_table import read_compacted_state
from cdc.log.consumers import Consumer, forget, register
from cdc.log.disk_format import COMPACTED
from cdc.log.vacuum import vacuum
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.faults.log_workload import CLOSED, SOON
from tests.log.rows import IDENTITY, info, row, table
from tests.log.simple_compaction import compact, read_rows


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    """A log of four segments, the first two of which are a run each."""
    writer = LogWriter.open(tmp_path, IDENTITY, CLOSED)
    for position in (10, 20, 30, 40):
        writer.commit(writer.stage(table(row(position, key=[str(position)]))), info(position))
    compact(tmp_path, 10)
    compact(tmp_path, 20)
    return tmp_path


def test_what_a_consumer_has_pinned_stays_although_an_older_merge_of_it_was_announced(root: Path) -> None:
    announced = read_compacted_state(root)
    assert announced is not None
    paths = {file.path.removeprefix(f"{root / COMPACTED}/"): file.size for file in announced.files}
    retired_files.record_removal(root, COMPACTED, paths, announced.version + 1)
    compact(root, 30)
    pinned = read_compacted_state(root)
    assert pinned is not None
    register(root, Consumer("c", "lake", Position(30), pinned=pinned.version, seen_at=1 << 60))
    compact(root, 40, merge=True)

    vacuum(root, SOON)
    assert sorted(row["position"] for file in pinned.files for row in read_rows(file)) == [10, 20, 30]
    forget(root, "c")
    vacuum(root, SOON)
    assert [file.path for file in pinned.files if Path(file.path).exists()] == []
    assert retired_files.list_removals(root) == {}
