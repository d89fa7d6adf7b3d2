"""instants: a moment lies before the first transaction that was committed later."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cdc.log import inspection
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.fixtures.examples import examples
from tests.log.rows import IDENTITY, LIMITS, info, row, table

BEGAN = 1_700_000_000_000_000
times = st.lists(st.integers(0, 3_000), min_size=1, max_size=6)
"""Microseconds of neighbouring transactions: some within a millisecond, some that go back."""


@given(st.lists(times, min_size=1, max_size=3), st.integers(-1, 3_001))
@examples(12)
def test_everything_before_a_moment_was_committed_by_then_and_what_follows_was_not(
    commits: list[list[int]], moment: int
):
    with tempfile.TemporaryDirectory() as folder:
        writer = LogWriter.open(Path(folder), IDENTITY, LIMITS)
        placed: list[tuple[int, int]] = []
        for commit in commits:
            own = [(len(placed) + n + 1, at) for n, at in enumerate(commit)]
            rows = [row(position, committed_at=BEGAN + at) for position, at in own]
            writer.commit(writer.stage(table(*rows)), info(own[-1][0]))
            placed += own
        log = LogReader(folder)
        found = inspection.position_at_time(log.every_file(), log.durable or Position(0), BEGAN + moment)

    assert all(at <= moment for position, at in placed if position <= found)
    following = [at for position, at in placed if position == found + 1]
    assert found == placed[-1][0] if not following else following[0] > moment
