"""Records of an epoch's start: they survive the process that wrote them, and a damaged one stops the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.errors import LogCorrupt
from cdc.log.epoch_and_slot_records import (
    PENDING_EPOCH_FILE,
    SLOT_RECORD_FILE,
    PendingEpoch,
    SlotRecord,
    read_pending_epoch,
    read_slot_record,
    remove_pending_epoch,
    write_pending_epoch,
    write_slot_record,
)
from cdc.lsn import Lsn

SLOT = SlotRecord(
    log_id="a",
    system_id="7000",
    timeline=1,
    database="shop",
    slot="cdc",
    confirmed_flush=Lsn(0x20),
    restart_lsn=Lsn(0x10),
)


def test_without_records_there_is_nothing_to_read(tmp_path: Path) -> None:
    assert read_pending_epoch(tmp_path) is None
    assert read_slot_record(tmp_path) is None


def test_a_pending_epoch_stays_until_it_is_removed(tmp_path: Path) -> None:
    request = PendingEpoch(2, "the slot was lost")
    write_pending_epoch(tmp_path, request)
    assert read_pending_epoch(tmp_path) == request
    for _ in range(2):
        remove_pending_epoch(tmp_path)
    assert read_pending_epoch(tmp_path) is None


@pytest.mark.parametrize("restart", [Lsn(0x10), None])
@pytest.mark.parametrize("adopted", [False, True])
def test_a_slot_is_read_as_it_was_written(tmp_path: Path, restart: Lsn | None, adopted: bool) -> None:
    record = SlotRecord(
        log_id="a",
        system_id="7000",
        timeline=1,
        database="shop",
        slot="cdc",
        confirmed_flush=Lsn(0x20),
        restart_lsn=restart,
        adopted=adopted,
    )
    write_slot_record(tmp_path, SLOT)
    write_slot_record(tmp_path, record)
    assert read_slot_record(tmp_path) == record


@pytest.mark.parametrize("content", ["", "{}", "[]", "{"])
def test_a_damaged_record_is_an_error_with_its_name(tmp_path: Path, content: str) -> None:
    for name in (PENDING_EPOCH_FILE, SLOT_RECORD_FILE):
        (tmp_path / name).write_text(content)
    with pytest.raises(LogCorrupt, match=r"_epoch\.json"):
        read_pending_epoch(tmp_path)
    with pytest.raises(LogCorrupt, match=r"_slot\.json"):
        read_slot_record(tmp_path)
