"""check_source: what stops a reader before it writes a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.errors import CdcError, SlotInvalidated, SlotMissing, SourceGap, SourceReplaced, SourceWentBack
from cdc.log.layout import CommitInfo, LogIdentity
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.replication import SystemIdentity
from cdc.postgres.slot import SlotStatus
from cdc.resume import check_source, confirmable

LOG = LogIdentity(system_id="7", database="shop")
LAST = CommitInfo(last=Position(1000), committed_at=0, timeline=1)
SOURCE = SystemIdentity(system_id="7", timeline=1, wal_end=Lsn(5000), database="shop")
SLOT = SlotStatus(
    name="cdc_shop",
    plugin="pgoutput",
    database="shop",
    active=True,
    active_pid=1,
    restart_lsn=Lsn(900),
    confirmed_flush=Lsn(1001),
    wal_status="reserved",
    safe_wal_size=None,
    invalidation_reason=None,
    retained_bytes=0,
    wal_end=Lsn(5000),
)


@pytest.mark.parametrize("confirmed", [0, 500, 1000, 1001])
def test_a_slot_at_or_behind_the_log_is_habit(confirmed: int):
    check_source(LOG, LAST, SOURCE, replace(SLOT, confirmed_flush=Lsn(confirmed)))


@pytest.mark.parametrize(
    ("source", "slot", "expected"),
    [
        (SOURCE, replace(SLOT, confirmed_flush=Lsn(1002)), SourceGap),
        (SOURCE, None, SlotMissing),
        (SOURCE, replace(SLOT, wal_status="lost"), SlotInvalidated),
        (SOURCE, replace(SLOT, invalidation_reason="wal_removed"), SlotInvalidated),
        (replace(SOURCE, system_id="8"), SLOT, SourceReplaced),
        (replace(SOURCE, timeline=2), SLOT, SourceReplaced),
        (replace(SOURCE, wal_end=Lsn(999)), SLOT, SourceWentBack),
    ],
)
def test_a_log_that_cannot_be_right_is_not_continued(
    source: SystemIdentity, slot: SlotStatus | None, expected: type[CdcError]
):
    with pytest.raises(expected) as caught:
        check_source(LOG, LAST, source, slot)
    assert caught.value.fix


def test_postgres_is_told_one_more_than_the_durable_position():
    assert confirmable(Lsn(1000)) == 1001
