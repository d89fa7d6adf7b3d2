"""check_source: what stops a reader before it writes a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.capture.resume_checks import INVALIDATED, check_source, lineage_of, lsn_to_confirm
from cdc.errors import (
    CdcError,
    FormerPrimary,
    PublicationByPartition,
    PublicationMissing,
    PublicationNarrowed,
    PublicationReplaced,
    Reaction,
    SlotInvalidated,
    SlotMissing,
    SlotUnsuitable,
    SourceBehindLog,
    SourceCloned,
    SourceForked,
    SourceGap,
    SourceInRecovery,
    SourceReplaced,
    SourceRestored,
    TimelineChanged,
    TransactionsLost,
)
from cdc.log.disk_format import CommitInfo, LogIdentity
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.replication import SystemIdentity
from cdc.postgres.slot import SlotStatus
from cdc.postgres.source_state import PublicationStatus, SourceState
from cdc.postgres.timeline_history import TimelineHistory, TimelineSwitch

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
BEHIND = replace(SLOT, confirmed_flush=Lsn(900), synced=True)


def promoted(timeline: int, switch_point: Lsn, reason: str = "no recovery target specified") -> SystemIdentity:
    """The source after it left a timeline."""
    history = TimelineHistory((TimelineSwitch(timeline, switch_point, reason),))
    return replace(SOURCE, timeline=timeline + 1, history=history)


PUBLICATION = PublicationStatus("cdc_shop_pub", oid=5, missing=())


@pytest.mark.parametrize("confirmed", [0, 500, 1000, 1001])
def test_a_slot_at_or_behind_the_log_is_habit(confirmed: int):
    check_source(LOG, LAST, SourceState(SOURCE, replace(SLOT, confirmed_flush=Lsn(confirmed)), PUBLICATION))


@pytest.mark.parametrize(
    ("source", "slot", "expected"),
    [
        (SOURCE, replace(SLOT, confirmed_flush=Lsn(1002)), SourceGap),
        (SOURCE, None, SlotMissing),
        (SOURCE, replace(SLOT, wal_status="lost"), SlotInvalidated),
        (SOURCE, replace(SLOT, invalidation_reason="wal_removed"), SlotInvalidated),
        (replace(SOURCE, system_id="8"), SLOT, SourceReplaced),
        (replace(SOURCE, timeline=2), SLOT, TimelineChanged),
        (replace(SOURCE, timeline=2, wal_end=Lsn(1)), SLOT, TimelineChanged),
        (promoted(1, Lsn(1000)), replace(SLOT, confirmed_flush=Lsn(1001)), SourceGap),
        (promoted(1, Lsn(1000)), None, SlotMissing),
        (promoted(1, Lsn(1000)), replace(BEHIND, synced=False), SourceCloned),
        (promoted(1, Lsn(1000), "before 2026-11-27"), BEHIND, SourceRestored),
        (promoted(1, Lsn(1000)), BEHIND, TransactionsLost),
        (promoted(1, Lsn(1008)), replace(SLOT, confirmed_flush=Lsn(1002)), SourceGap),
        (promoted(2, Lsn(2000)), SLOT, TimelineChanged),
        (SOURCE, replace(SLOT, plugin=None), SlotUnsuitable),
        (SOURCE, replace(SLOT, plugin="test_decoding"), SlotUnsuitable),
        (SOURCE, replace(SLOT, database="other"), SlotUnsuitable),
        (replace(SOURCE, wal_end=Lsn(999)), SLOT, SourceBehindLog),
    ],
)
def test_a_log_that_cannot_be_right_is_not_continued(
    source: SystemIdentity, slot: SlotStatus | None, expected: type[CdcError]
):
    with pytest.raises(expected) as caught:
        check_source(LOG, LAST, SourceState(source, slot, PUBLICATION))
    assert caught.value.fix


@pytest.mark.parametrize("reason", ["no recovery target specified", "before 2026-11-27"])
@pytest.mark.parametrize("switch_point", [1001, 1008])
def test_a_promotion_after_the_log_s_last_record_continues(switch_point: int, reason: str):
    check_source(LOG, LAST, SourceState(promoted(1, Lsn(switch_point), reason), SLOT, PUBLICATION))


def test_of_several_promotions_the_one_that_left_the_log_s_timeline_counts():
    switches = (TimelineSwitch(1, Lsn(500)), TimelineSwitch(2, Lsn(1008)), TimelineSwitch(3, Lsn(1008)))
    source = replace(SOURCE, timeline=4, history=TimelineHistory(switches))
    check_source(LOG, replace(LAST, timeline=2, switch_point=Lsn(500)), SourceState(source, SLOT, PUBLICATION))
    with pytest.raises(TransactionsLost, match="left timeline 1 at 0/1F4 for timeline 4"):
        check_source(LOG, LAST, SourceState(source, replace(BEHIND, confirmed_flush=Lsn(499)), PUBLICATION))


@pytest.mark.parametrize("timeline", [2, 3])
def test_a_timeline_that_began_elsewhere_is_another_server(timeline: int):
    switches = (TimelineSwitch(1, Lsn(500)), TimelineSwitch(2, Lsn(1008)))[: timeline - 1]
    source = replace(SOURCE, timeline=timeline, history=TimelineHistory(switches))
    log = replace(LAST, timeline=2, switch_point=Lsn(508))
    with pytest.raises(SourceForked, match="two servers were promoted"):
        check_source(LOG, log, SourceState(source, SLOT, PUBLICATION))
    check_source(LOG, replace(log, switch_point=Lsn(0)), SourceState(source, SLOT, PUBLICATION))  # of an older version


def test_a_primary_from_before_the_promotion_is_waited_for():
    with pytest.raises(FormerPrimary) as caught:
        check_source(LOG, replace(LAST, timeline=2), SourceState(SOURCE, SLOT, PUBLICATION))
    assert caught.value.reaction is Reaction.RETRY


@pytest.mark.parametrize("slot", [None, replace(SLOT, synced=True)])
def test_a_standby_without_a_slot_of_its_own_is_waited_for(slot: SlotStatus | None):
    with pytest.raises(SourceInRecovery) as caught:
        check_source(LOG, LAST, SourceState(replace(SOURCE, wal_end=Lsn(1), in_recovery=True), slot, PUBLICATION))
    assert caught.value.reaction is Reaction.RETRY


def test_a_standby_with_a_slot_of_its_own_can_be_captured_from():
    check_source(LOG, LAST, SourceState(replace(SOURCE, in_recovery=True), replace(SLOT, synced=False), PUBLICATION))


def test_one_more_than_the_durable_position_is_confirmed_to_postgres():
    assert lsn_to_confirm(Lsn(1000)) == 1001


@pytest.mark.parametrize(
    ("publication", "expected"),
    [
        (None, PublicationMissing),
        (replace(PUBLICATION, oid=6), PublicationReplaced),
    ],
)
def test_a_publication_that_sends_less_than_the_log_expects_is_refused(
    publication: PublicationStatus | None, expected: type[CdcError]
):
    last = replace(LAST, publication=5)
    check_source(LOG, last, SourceState(SOURCE, SLOT, PUBLICATION))
    with pytest.raises(expected) as caught:
        check_source(LOG, last, SourceState(SOURCE, SLOT, publication))
    assert "--new-epoch" in caught.value.fix


def test_a_table_that_is_no_longer_published_is_named_with_the_sql_and_its_copy():
    narrowed = replace(PUBLICATION, missing=("shop.orders", 'Odd."a.b"'))
    with pytest.raises(PublicationNarrowed, match=r"shop\.orders") as caught:
        check_source(LOG, replace(LAST, publication=5), SourceState(SOURCE, SLOT, narrowed))
    assert 'ADD TABLE ONLY "shop"."orders", ONLY "Odd"."a.b";' in caught.value.fix
    assert "'cdc tables resync shop.orders'" in caught.value.fix


def test_a_publication_that_sends_a_partitioned_table_by_leaf_is_refused_with_the_sql():
    by_leaf = replace(PUBLICATION, by_leaf=("shop.orders",))
    with pytest.raises(PublicationByPartition, match=r"shop\.orders") as caught:
        check_source(LOG, replace(LAST, publication=5), SourceState(SOURCE, SLOT, by_leaf))
    assert "publish_via_partition_root = true" in caught.value.fix


@pytest.mark.parametrize("reason", ["wal_removed", "rows_removed", "wal_level_insufficient", "idle_timeout"])
def test_each_reason_of_an_invalidation_has_the_setting_that_mends_it(reason: str):
    with pytest.raises(SlotInvalidated, match=reason) as caught:
        check_source(LOG, LAST, SourceState(SOURCE, replace(SLOT, invalidation_reason=reason), PUBLICATION))
    assert caught.value.fix == INVALIDATED[reason]


def test_after_an_epoch_the_system_that_the_last_commit_names_holds_and_not_the_first():
    moved = replace(LAST, system_id="8")
    check_source(LOG, moved, SourceState(replace(SOURCE, system_id="8"), SLOT, PUBLICATION))
    with pytest.raises(SourceReplaced):
        check_source(LOG, moved, SourceState(SOURCE, SLOT, PUBLICATION))


def test_what_a_session_says_of_its_source_comes_back_from_the_commit():
    lineage = lineage_of(SourceState(promoted(1, Lsn(900)), SLOT, PUBLICATION))
    info = CommitInfo(last=Position(1), committed_at=0, **lineage._asdict())
    assert CommitInfo.from_metadata(info.to_metadata()) == info
    assert info.commit_source == lineage
    assert (info.timeline, info.switch_point) == (2, 900)


def test_a_commit_of_an_older_version_names_no_switch_point():
    metadata = LAST.to_metadata()
    del metadata["cdc.switch_point"]
    assert CommitInfo.from_metadata(metadata) == LAST
