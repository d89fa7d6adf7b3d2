"""Recovery: commands that refuse before they connect to the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.capture.operator_recovery import adopt_slot, begin_epoch, skip_to_lsn
from cdc.errors import ConfigError, LogError, StateConflict
from cdc.log.epoch_and_slot_records import PendingEpoch, write_pending_epoch
from cdc.log.writer import LogWriter
from cdc.lsn import Lsn
from tests.faults.capture import Captured
from tests.log.rows import IDENTITY, LIMITS, info

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


@pytest.fixture(name="pipeline")
def _pipeline(tmp_path: Path) -> Captured:
    """A definition whose source does not answer, and which has no log."""
    return Captured(tmp_path, NOWHERE, slot="cdc_recovery")


def test_without_a_log_no_epoch_begins_and_nothing_is_skipped(pipeline: Captured) -> None:
    for command in (lambda: begin_epoch(pipeline.definition), lambda: skip_to_lsn(pipeline.definition, Lsn(9), ["*"])):
        with pytest.raises(LogError):
            command()
    assert not (pipeline.folder / "log").exists()


def test_an_empty_log_needs_no_recovery(pipeline: Captured) -> None:
    LogWriter.open(pipeline.folder / "log", IDENTITY, LIMITS)
    for command in (lambda: begin_epoch(pipeline.definition), lambda: skip_to_lsn(pipeline.definition, Lsn(9), ["*"])):
        with pytest.raises(LogError, match="the log is empty") as caught:
            command()
        assert "start the reader" in caught.value.fix


def test_a_log_whose_next_epoch_was_requested_is_not_skipped_forward(pipeline: Captured) -> None:
    LogWriter.open(pipeline.folder / "log", IDENTITY, LIMITS).commit([], info(5))
    write_pending_epoch(pipeline.folder / "log", PendingEpoch(1, "requested"))
    with pytest.raises(StateConflict, match="epoch 1 was requested"):
        skip_to_lsn(pipeline.definition, Lsn(9), ["*"])


def test_a_slot_is_adopted_only_if_the_reader_may_not_create_one(pipeline: Captured) -> None:
    with pytest.raises(ConfigError, match=r"source\.slot\.create is true"):
        adopt_slot(pipeline.definition)
