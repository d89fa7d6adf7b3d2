"""Contract of readers of a sink: a table that cannot be opened."""

from __future__ import annotations

from cdc.errors import SinkUnavailable
from cdc.targets.sink_reading import UnreadableTable, refusal_reason


def test_a_table_that_cannot_be_opened_has_its_reason_and_no_rows() -> None:
    table = UnreadableTable(refusal_reason(SinkUnavailable("the store is away", remedy="start it")))

    assert table.refusal == "CDC-3003 the store is away → start it"
    assert (table.reads_ranges, table.kind("id"), [*table.rows(["id"])], table.count([])) == (False, None, [], 0)
