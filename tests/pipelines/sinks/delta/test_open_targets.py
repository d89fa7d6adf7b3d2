"""Open targets: a path with files of another program stays unchanged, and a lost target is not created again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc.targets.published_record import TableRecord, TargetState
from tests.pipelines.shop_pipeline import END, ITEMS, ShopPipeline, make_shop
from tests.pipelines.shop_pipeline import ORDERS as RELATION

STRANGE = pa.table({"id": [1, 2], "theirs": ["a", "b"]})


@pytest.fixture(name="ground")
def _ground(tmp_path: Path) -> ShopPipeline:
    return make_shop(tmp_path / "shop")


def published_record(ground: ShopPipeline, relation: int) -> TableRecord:
    published = ground.lake_of().published()
    assert published is not None
    assert published.position == END
    return published.tables[relation]


def test_a_strangers_delta_table_stays_as_it_is_and_stops_one_table(ground: ShopPipeline) -> None:
    place = f"{ground.folder}/lake/shop/orders"
    write_deltalake(place, STRANGE)
    ground.drive("lake")

    stopped = published_record(ground, RELATION)
    assert stopped.state == TargetState.FAILED
    assert stopped.reason == (
        f"CDC-3017 the Delta table at {place!r} was not created by cdc: it has no property 'cdc.log_id' → "
        "set another path in the sink or in a rule for the table, or move the files at this path to another directory"
    )
    assert published_record(ground, ITEMS).state == TargetState.STREAMING
    assert DeltaTable(place).version() == 0
    assert pa.table(DeltaTable(place).scan()).num_rows == 2


def test_files_of_no_delta_table_stop_one_table_as_well(ground: ShopPipeline) -> None:
    place = ground.folder / "lake" / "shop" / "orders"
    place.mkdir(parents=True)
    pq.write_table(STRANGE, place / "theirs.parquet")
    ground.drive("lake")

    assert f"{str(place)!r} is neither a Delta table nor empty: it contains 'theirs.parquet'" in str(
        published_record(ground, RELATION).reason
    )
    assert [entry.name for entry in place.iterdir()] == ["theirs.parquet"]
    assert published_record(ground, ITEMS).state == TargetState.STREAMING


def test_a_target_of_another_log_stops_one_table_as_well(ground: ShopPipeline, tmp_path: Path) -> None:
    make_shop(tmp_path / "other").drive("lake")
    place = ground.folder / "lake" / "shop" / "orders"
    shutil.copytree(tmp_path / "other" / "lake" / "shop" / "orders", place)
    before = DeltaTable(place).version()
    ground.drive("lake")

    assert f"the Delta table at {str(place)!r} was written from log" in str(published_record(ground, RELATION).reason)
    assert DeltaTable(place).version() == before


def test_a_strangers_table_in_the_place_of_a_target_is_told_when_the_sink_opens(ground: ShopPipeline) -> None:
    ground.drive("lake", 1_200)
    place = ground.folder / "lake" / "shop" / "orders"
    shutil.rmtree(place)
    write_deltalake(str(place), STRANGE)
    ground.drive("lake")

    assert "was not created by cdc" in str(published_record(ground, RELATION).reason)
    assert DeltaTable(place).version() == 0


def test_a_target_that_is_gone_stops_its_table_and_comes_back_whole_when_it_is_put_back(ground: ShopPipeline) -> None:
    ground.drive("lake", 1_200)
    place = ground.folder / "lake" / "shop" / "orders"
    away = place.rename(ground.folder / "away")
    ground.drive("lake", 1_300)
    ground.drive("lake")

    stopped = published_record(ground, RELATION)
    assert stopped.reason == (
        f"CDC-3017 target {str(place)!r} of table 'shop.orders' no longer exists → "
        "restore the files and restart the apply process, or rebuild: 'cdc replay SINK --tables shop.orders'"
    )
    assert not place.exists()
    assert published_record(ground, ITEMS).state == TargetState.STREAMING
    assert away.exists()
