"""The reader process trims its own log between commits, also while the source is quiet, and captures on."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.log.consumers import Consumer, register
from cdc.log.retired_files import list_removals
from cdc.log.trim_plan import request_trim
from cdc.log.vacuum import waiting
from cdc.position import Position
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.log.simple_compaction import compact


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    """A copied table under a definition with a segment for each file and without grace."""
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'old'), (2, 'old')")
    held = Captured(tmp_path, database)
    text = held.path.read_text().replace("/log'}", "/log', segment: {bytes: 1B}, retain: {max: 7d, grace: 0s}}")
    held.path.write_text(text)
    held.copy()
    return held


def segments(held: Captured) -> int:
    return len(held.log.segments())


def test_a_running_reader_trims_what_everybody_has_read_and_goes_on(held: Captured):
    root = held.folder / "log"
    with held.reading() as reading:
        for number in range(3):
            run_sql(held.dsn, f"UPDATE t SET v = 'new {number}' WHERE id = 1")
            reading.caught_up()
        reading.until(lambda: segments(held) >= 5, "a segment for each commit")
        durable = held.log.durable or Position(0)
        compact(root, durable)
        register(root, Consumer("c", "lake", durable))
        request_trim(root)
        reading.until(lambda: held.log.oldest > 0, "the trim")
        assert segments(held) == 1
        request_trim(root)
        reading.until(lambda: list_removals(root) == {}, "the files of it gone")
        assert waiting(root) == 0  # later the second request may trim the segment that ends with these changes
        run_sql(held.dsn, "DELETE FROM t WHERE id = 2", "INSERT INTO t VALUES (3, 'later')")
        reading.caught_up()
    assert held.folded("t") == [("1", "new 2"), ("3", "later")]
    run_sql(held.dsn, "INSERT INTO t VALUES (4, 'last')")
    held.stream()
    assert held.folded("t") == [("1", "new 2"), ("3", "later"), ("4", "last")]
