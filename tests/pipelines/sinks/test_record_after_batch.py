"""Standing: what is told of a table that stands still, in words that can be copied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.errors import SchemaNotApplicable
from cdc.table import TableState
from pipelines.sinks.record_after_batch import check_captured, failed_record
from tests.log.rows import schema_of

ORDERS = schema_of(1, "total")


@pytest.mark.parametrize(
    ("state", "command"),
    [
        (TableState.NEEDS_RESYNC, "cdc tables resync {}"),
        (TableState.DROPPED, "cdc replay SINK --tables {}"),
    ],
)
def test_a_table_without_all_of_its_changes_is_told_with_what_helps(state: TableState, command: str) -> None:
    with pytest.raises(SchemaNotApplicable) as caught:
        check_captured(replace(ORDERS, state=state, reason="column 'total' changed its type"))

    told = failed_record(None, ORDERS, caught.value).reason
    assert told is not None
    assert f"is {state.value}: column 'total' changed its type" in told
    assert f"'{command.format(ORDERS.topic)}'" in told


@pytest.mark.parametrize("state", [TableState.LIVE, TableState.SNAPSHOTTING])
def test_a_captured_table_goes_on(state: TableState) -> None:
    check_captured(replace(ORDERS, state=state))
