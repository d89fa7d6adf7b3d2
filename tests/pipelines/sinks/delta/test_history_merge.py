"""History merge: batches that come again, and changes that the log has only folded."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config.delta_sink import HistoryMode
from cdc.errors import HistoryTrimmed
from tests.contracts.histories import RELATION, SETTINGS, Lake, batch, kept
from tests.contracts.stories import history
from tests.pipelines.fold_model import log_row


def test_a_batch_that_was_applied_changes_nothing_when_it_or_a_part_of_it_comes_again(tmp_path: Path) -> None:
    rows, positions = history(3, 12)
    for keeping, settings in SETTINGS.items():
        lake = Lake(f"{tmp_path}/{keeping}", settings)
        lake.apply(rows, 0, positions[-1])
        found = kept(lake, keeping)
        for after, upto in [(0, positions[-1]), (0, positions[2]), (positions[1], positions[5])]:
            lake.start()
            record = lake.apply(rows, after, upto)
            assert record.position == positions[-1]
        assert kept(lake, keeping) == found


def test_changes_that_the_log_has_only_as_what_they_come_to_begin_a_history_and_never_go_on_with_one(
    tmp_path: Path,
) -> None:
    rows = [log_row(RELATION, (position, 0), "r", key=["1"], after={1: "1", 2: str(position)}) for position in (4, 8)]
    for keeping, settings in SETTINGS.items():
        lake = Lake(f"{tmp_path}/{keeping}", settings)
        lake.sink.apply(batch(rows, 0, 4, since=4))
        with pytest.raises(HistoryTrimmed, match=r"after 0/4, but the log contains single changes only after 0/9"):
            lake.sink.apply(batch(rows, 4, 9, since=9))
        gone = [log_row(RELATION, (8, 0), "d", key=["1"], before={1: "1"})]
        for said in (gone, [log_row(RELATION, (8, 0), "t")]):
            with pytest.raises(HistoryTrimmed):
                lake.sink.apply(batch(said, 4, 9, since=9))
        lake.sink.apply(batch(rows, 0, 5, since=5))  # nothing came after 4
        lake.sink.apply(batch(rows, 5, 9))
        assert len(lake.rows()) == (1 if keeping is HistoryMode.MARKED else 2)
