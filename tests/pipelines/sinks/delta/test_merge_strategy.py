"""Merge strategies: the settings of a table choose its strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config.sinks import HistoryMode
from pipelines.sinks.delta.history_strategy import History
from pipelines.sinks.delta.latest_state_strategy import LatestState
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS
from tests.contracts.histories import ALL_SETTINGS
from tests.pipelines.sinks.delta.test_sink_parts import settings_in


@pytest.mark.parametrize("mode", ALL_SETTINGS)
def test_the_mode_of_a_table_chooses_its_strategy(tmp_path: Path, mode: HistoryMode) -> None:
    sink = DeltaSink(settings_in(tmp_path, ALL_SETTINGS[mode]))
    strategy = sink._strategy(ORDERS)
    latest = mode is HistoryMode.LATEST

    assert isinstance(strategy, LatestState if latest else History)
    assert strategy.replaced_by_copy == latest
    assert sink.keeps_history(ORDERS) != latest
