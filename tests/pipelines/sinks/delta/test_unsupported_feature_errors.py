"""Table features of a target that its writer does not support: the table stops alone, and its error names them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc.config.delta_sink import WriterChoice
from cdc.errors import TargetUnusable
from cdc.targets.published_record import TargetState
from pipelines.sinks.delta.maintenance import UpkeepSettings
from tests.contracts.folded import batch, put
from tests.pipelines.shop_pipeline import END, make_shop
from tests.pipelines.shop_pipeline import ORDERS as RELATION
from tests.pipelines.sinks.added_features import add_features, filled_sink
from tests.pipelines.sinks.maintained_sink import MaintainedSink


def test_a_table_with_features_that_nobody_here_writes_stops_alone_and_says_which(tmp_path: Path) -> None:
    ground = make_shop(tmp_path / "shop")
    lake, find = ground.definition.sinks
    by_copying = lake.model_copy(update={"writer": WriterChoice.COPY_ON_WRITE})
    ground = replace(ground, definition=ground.definition.model_copy(update={"sinks": (by_copying, find)}))
    ground.drive("lake", 1_100)
    before = ground.lake()["shop.orders"]
    add_features(f"{tmp_path}/shop/lake/shop/orders", ["rowTracking", "domainMetadata"])
    ground.drive("lake")

    published = ground.lake_of().published()
    assert published is not None
    stopped = published.tables[RELATION]
    assert (published.position, stopped.state, stopped.position) == (END, TargetState.FAILED, 1_100)
    assert stopped.reason is not None
    assert "'domainMetadata', 'rowTracking'" in stopped.reason
    assert "set writer to 'auto' or 'spark' and provide the Delta jars; or move the target to" in stopped.reason
    assert ground.lake()["shop.orders"] == before
    assert [row["note"] for row in ground.lake()["shop.items"]] == ["later", "too"]


def test_an_append_only_table_stops_alone_when_a_row_changes(tmp_path: Path) -> None:
    sink, uri = filled_sink(tmp_path)
    DeltaTable(uri).alter.set_table_properties({"delta.appendOnly": "true"})
    assert sink.apply(batch([put(4, "d", 30)], 20, 40)).position == 40
    with pytest.raises(TargetUnusable, match=r"append-only \(delta.appendOnly\)") as told:
        sink.apply(batch([put(1, "A", 50)], 40, 60))
    assert "set delta.appendOnly to false" in told.value.fix


def test_upkeep_of_a_table_with_features_removes_files_and_refuses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=1.0, vacuum_after=1.0, retain=0.0))
    for _ in range(3):
        upkept.round()
    add_features(upkept.uri, ["rowTracking", "domainMetadata"])
    for _ in range(4):
        upkept.clock.now += 100.0
        upkept.look()

    assert "maintenance of a target failed" not in capsys.readouterr().out
    assert not upkept.upkeep._turns[upkept.uri].refused
