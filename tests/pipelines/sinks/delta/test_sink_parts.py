"""Parts of a Delta sink: its merge strategies share them."""

from __future__ import annotations

from pathlib import Path

from cdc.config import TableSettings
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink_parts import DeltaSinkParts
from tests.contracts.folded import ORDERS


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
