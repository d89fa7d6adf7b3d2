"""Keeping strategies: the services that the strategies of one sink share, and the strategy of each table."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config import TableSettings
from cdc.config.sinks import HistoryMode
from pipelines.sinks.delta.history_strategy import History
from pipelines.sinks.delta.keeping_strategy import DeltaSinkParts
from pipelines.sinks.delta.latest_state_strategy import LatestState
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS
from tests.contracts.histories import ALL_SETTINGS


def settings_in(folder: Path, table: TableSettings | None = None) -> DeltaSettings:
    return DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}", table=table or TableSettings())


def test_targets_and_strategies_use_the_same_services(tmp_path: Path) -> None:
    parts = DeltaSinkParts.of(settings_in(tmp_path))

    assert parts.plans.spark is None
    assert parts.targets.shape(ORDERS) is parts.plans.of(ORDERS, parts.settings.types_of(ORDERS.topic))
    assert not parts.writers.by_spark


def test_closed_parts_open_their_targets_again(tmp_path: Path) -> None:
    parts = DeltaSinkParts.of(settings_in(tmp_path))
    parts.targets.log_id = "log-1"
    first = parts.targets.open(ORDERS)
    assert parts.targets.open(ORDERS) is first
    parts.targets.record_erasure(ORDERS.relation, 20)
    parts.close()

    again = parts.targets.open(ORDERS)
    assert again is not first
    assert (again.identity, parts.targets.erased_upto(again, ORDERS.relation)) == (first.identity, 0)


@pytest.mark.parametrize("mode", ALL_SETTINGS)
def test_the_mode_of_a_table_chooses_its_strategy(tmp_path: Path, mode: HistoryMode) -> None:
    sink = DeltaSink(settings_in(tmp_path, ALL_SETTINGS[mode]))
    strategy = sink._strategy(ORDERS)
    latest = mode is HistoryMode.LATEST

    assert isinstance(strategy, LatestState if latest else History)
    assert strategy.replaced_by_copy == latest
    assert sink.keeps_history(ORDERS) != latest
