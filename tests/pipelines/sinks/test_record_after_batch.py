"""Standing: what is told of a table that stands still, in words that can be copied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.errors import SchemaNotApplicable
from cdc.table import TableState
from cdc.targets.published_record import TableRecord, TargetState
from pipelines.sinks.record_after_batch import check_captured, failed_record, is_done, key_required, missing_base
from tests.contracts.folded import batch
from tests.log.rows import schema_of

ORDERS = schema_of(1, "total")


def test_a_table_without_all_of_its_changes_is_told_with_what_helps() -> None:
    needs_resync = TableState.NEEDS_RESYNC
    with pytest.raises(SchemaNotApplicable) as caught:
        check_captured(replace(ORDERS, state=needs_resync, reason="column 'total' changed its type"))

    told = failed_record(None, ORDERS, caught.value).reason
    assert told is not None
    assert f"is {needs_resync.value}: column 'total' changed its type" in told
    assert f"'cdc tables resync {ORDERS.topic}'" in told


@pytest.mark.parametrize("state", [TableState.LIVE, TableState.SNAPSHOTTING, TableState.DROPPED])
def test_a_captured_table_goes_on(state: TableState) -> None:
    check_captured(replace(ORDERS, state=state))


@pytest.mark.parametrize(
    ("state", "position", "done"),
    [
        (TargetState.STREAMING, 40, True),
        (TargetState.STREAMING, 39, False),
        (TargetState.FAILED, 19, True),
        (TargetState.FAILED, 20, False),
    ],
)
def test_a_batch_is_done_if_it_is_published_or_the_table_failed_before_it(state, position, done):
    record = TableRecord(
        relation=ORDERS.relation, topic=ORDERS.topic, target="t", position=position, version=None, state=state.value
    )

    assert is_done(record, batch(None, 20, 40, schema=ORDERS)) is done


def test_an_error_names_table_and_position():
    assert missing_base(ORDERS, 30).message == (
        f"the target of table {ORDERS.topic!r} has no base row for a partial image at 0/1E"
    )
    assert f"{ORDERS.topic!r} has no key" in key_required(ORDERS).message
