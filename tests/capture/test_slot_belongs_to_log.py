"""Slot checks: which slots belong to a log, and the error for each of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cdc.capture.slot_belongs_to_log import (
    SlotClaim,
    check_adopted,
    check_replaceable,
    check_replaceable_by_command,
    check_resume,
    check_slot_name,
)
from cdc.errors import (
    CdcError,
    LogFenced,
    SlotInUse,
    SlotNotCreated,
    SlotNotOwned,
    SlotUnsuitable,
    SourceError,
    UnexpectedSlot,
)
from cdc.log.disk_format import CommitInfo, LogIdentity
from cdc.log.epoch_and_slot_records import SlotRecord, read_slot_record
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.replication import SystemIdentity
from cdc.postgres.slot import SlotStatus
from cdc.postgres.source_state import PublicationStatus, SourceState

SOURCE = SystemIdentity(system_id="7", timeline=1, wal_end=Lsn(5000), database="shop")
SLOT = SlotStatus(
    name="cdc_shop",
    plugin="pgoutput",
    database="shop",
    active=False,
    active_pid=None,
    restart_lsn=Lsn(900),
    confirmed_flush=Lsn(1001),
    wal_status="reserved",
    safe_wal_size=None,
    invalidation_reason=None,
    retained_bytes=0,
    wal_end=Lsn(5000),
)
LAST = CommitInfo(last=Position(1000), committed_at=0, timeline=1, system_id="7")
WRITTEN = SlotClaim(Path("log"), "log-1", LAST, "7", None)
"""A log with commits and without a slot record."""
EMPTY = replace(WRITTEN, last=None)


def recorded(claim: SlotClaim, slot: SlotStatus = SLOT, *, adopted: bool = False) -> SlotClaim:
    return replace(claim, record=claim.record_of(slot, SOURCE, adopted=adopted))


def test_a_slot_at_or_behind_the_log_of_this_server_may_be_replaced() -> None:
    check_replaceable(SLOT, WRITTEN, SOURCE)
    check_replaceable(replace(SLOT, confirmed_flush=Lsn(900)), WRITTEN, SOURCE)


def test_an_unfinished_slot_that_the_record_describes_may_be_replaced() -> None:
    check_replaceable(SLOT, recorded(EMPTY), SOURCE)


@pytest.mark.parametrize(
    ("slot", "claim", "source", "expected"),
    [
        (replace(SLOT, confirmed_flush=Lsn(1002)), WRITTEN, SOURCE, SlotNotOwned),
        (SLOT, WRITTEN, replace(SOURCE, timeline=2), SlotNotOwned),
        (SLOT, WRITTEN, replace(SOURCE, system_id="8"), SlotNotOwned),
        (SLOT, recorded(WRITTEN, replace(SLOT, name="other")), SOURCE, SlotNotOwned),
        (SLOT, EMPTY, SOURCE, UnexpectedSlot),
        (replace(SLOT, confirmed_flush=Lsn(1003)), recorded(EMPTY), SOURCE, UnexpectedSlot),
        (SLOT, replace(recorded(EMPTY), log_id="log-2"), SOURCE, UnexpectedSlot),
        (SLOT, recorded(EMPTY, adopted=True), SOURCE, UnexpectedSlot),
        (replace(SLOT, active=True, active_pid=1), WRITTEN, SOURCE, SlotInUse),
        (replace(SLOT, plugin=None), WRITTEN, SOURCE, SlotUnsuitable),
    ],
)
def test_any_other_slot_is_not_replaced(
    slot: SlotStatus, claim: SlotClaim, source: SystemIdentity, expected: type[CdcError]
) -> None:
    with pytest.raises(expected) as caught:
        check_replaceable(slot, claim, source)
    assert caught.value.fix


def test_a_record_does_not_prove_a_slot_whose_commits_the_catalog_has_seen() -> None:
    with pytest.raises(UnexpectedSlot, match="the catalog last recorded"):
        check_replaceable(SLOT, recorded(EMPTY), SOURCE, Position(1000))


def test_a_command_replaces_a_slot_without_evidence_but_not_one_that_another_reader_confirmed() -> None:
    check_replaceable_by_command(replace(SLOT, confirmed_flush=Lsn(2000)), WRITTEN, SOURCE)
    with pytest.raises(SlotNotOwned, match="a reader of another log has confirmed"):
        check_replaceable_by_command(replace(SLOT, confirmed_flush=Lsn(2001)), WRITTEN, SOURCE)
    with pytest.raises(SlotNotOwned, match="is on cluster 8"):
        check_replaceable_by_command(replace(SLOT, confirmed_flush=Lsn(2000)), WRITTEN, replace(SOURCE, system_id="8"))


def test_a_log_is_not_continued_from_a_slot_of_another_name() -> None:
    check_slot_name(recorded(WRITTEN), SLOT)
    with pytest.raises(SlotNotOwned, match="'cdc_shop', but the definition names slot 'other'"):
        check_slot_name(recorded(WRITTEN), replace(SLOT, name="other"))


def test_a_log_begins_only_at_the_slot_that_an_operator_adopted_for_it() -> None:
    assert check_adopted(SLOT, SLOT.name, recorded(EMPTY, adopted=True), SOURCE) == SLOT
    for slot, claim in ((None, EMPTY), (SLOT, EMPTY), (SLOT, recorded(EMPTY))):
        with pytest.raises(SlotNotCreated):
            check_adopted(slot, SLOT.name, claim, SOURCE)


def test_resuming_a_log_without_a_slot_record_writes_it(tmp_path: Path) -> None:
    identity = LogIdentity(system_id="7", database="shop")
    LogWriter.open(tmp_path, identity, SegmentLimits(size=1 << 28, age=3600.0)).commit([], LAST)
    publication = PublicationStatus("cdc_shop_pub", oid=5, missing=())

    check_resume(tmp_path, LogReader(tmp_path), LAST, SourceState(SOURCE, SLOT, publication))

    record = read_slot_record(tmp_path)
    assert isinstance(record, SlotRecord)
    assert (record.slot, record.confirmed_flush, record.adopted) == (SLOT.name, SLOT.confirmed_flush, False)


@pytest.mark.parametrize("slot", [replace(SLOT, confirmed_flush=Lsn(3001)), replace(SLOT, wal_status="lost"), None])
def test_a_reader_that_another_one_overtook_before_it_saw_the_slot_notices_it(
    tmp_path: Path, slot: SlotStatus | None
) -> None:
    """It read the log, was frozen, and saw a slot that the other reader had advanced."""
    identity = LogIdentity(system_id="7", database="shop")
    writer = LogWriter.open(tmp_path, identity, SegmentLimits(size=1 << 28, age=3600.0))
    writer.commit([], LAST)
    state = SourceState(SOURCE, slot, PublicationStatus("cdc_shop_pub", oid=5, missing=()))
    log = LogReader(tmp_path)
    with pytest.raises(SourceError):
        check_resume(tmp_path, log, LAST, state)
    writer.commit([], replace(LAST, last=Position(3000)))
    with pytest.raises(LogFenced, match="another reader committed to the log up to 0/BB8"):
        check_resume(tmp_path, log, LAST, state)
