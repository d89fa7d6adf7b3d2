"""Inspection: which rows a selection includes; a moment lies before the first transaction that was committed later."""

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
from tests.log.rows import IDENTITY, LIMITS, info, message_row, row, table

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


def test_a_selection_includes_tables_by_topic_and_messages_by_prefix():
    rows = table(
        row(10), row(11, topic="shop.items"), message_row(12, prefix="a"), message_row(13, prefix=""),
        message_row(14, key=None),
    )  # fmt: skip

    def positions(selected: inspection.RowSelection) -> list[int]:
        found: list[int] = selected.filter(rows)["position"].to_pylist()
        return found

    def is_items(topic: str) -> bool:
        return topic == "shop.items"

    assert positions(inspection.EVERY_ROW) == [10, 11, 12, 13, 14]
    assert positions(inspection.rows_of_tables(is_items)) == [11]
    assert positions(inspection.RowSelection(topics=is_items, prefixes=lambda prefix: prefix == "a")) == [11, 12]
    # an unknown prefix counts as an empty one
    nothing = inspection.RowSelection(topics=lambda _topic: False, prefixes=lambda prefix: not prefix)
    assert positions(nothing) == [13, 14]


def test_messages_are_rows_of_their_transaction_and_are_in_no_outline(tmp_path: Path):
    writer = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    outside = message_row(19, xid=0, key=["b", "f", "0/14"])
    rows = [row(10, 0), message_row(10, 1), row(10, 2), outside]
    writer.commit(writer.stage(table(*rows)), info(20))
    log = LogReader(tmp_path)

    assert inspection.transaction(log, Position(10))["op"].to_pylist() == ["c", "m", "c"]
    assert inspection.transaction(log, Position(19))["key"].to_pylist() == [["b", "f", "0/14"]]
    shown, count = inspection.outline(log, Position(10), 9)
    assert (shown["op"].to_pylist(), count) == (["c", "c"], 2)
