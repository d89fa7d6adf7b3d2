"""One target with damaged files stops its own table with a code; the other tables go on, and a replay repairs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc.config import load_definition
from cdc.targets.published_record import TableRecord, TargetState
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.replay import replay
from tests.pipelines.shop_pipeline import END, ITEMS, ORDERS, ShopPipeline, applied_shop, change, make_shop


def first_commit_garbled(table: Path) -> None:
    (table / "_delta_log" / f"{0:020d}.json").write_text("{no JSON")


def commit_empty(table: Path) -> None:
    (table / "_delta_log" / f"{1:020d}.json").write_bytes(b"")


def data_files_missing(table: Path) -> None:
    for file in table.glob("part-*.parquet"):
        file.unlink()


def data_files_cut_off(table: Path) -> None:
    for file in table.glob("part-*.parquet"):
        file.write_bytes(file.read_bytes()[:50])


LOGS = [first_commit_garbled, commit_empty]


def records(shop: ShopPipeline) -> dict[int, TableRecord]:
    published = shop.lake_of().published()
    assert published is not None
    return {number: published.tables[number] for number in (ORDERS, ITEMS)}


def with_writer(shop: ShopPipeline, writer: str) -> None:
    """Set the writer of the lake."""
    file = shop.folder / "shop.yaml"
    file.write_text(file.read_text().replace("name: lake,", f"name: lake, writer: {writer},"))
    shop.definition = load_definition(file)


def append_change(shop: ShopPipeline) -> None:
    shop.append(1_500, [change(1_500, 0, 1, "last", op="u"), change(1_500, 1, 7, "last", op="u", of=ITEMS)])


@pytest.mark.parametrize("damage", LOGS)
def test_a_delta_log_that_cannot_be_read_stops_its_table_alone_and_a_replay_makes_it_again(
    damage: Callable[[Path], None],
) -> None:
    shop = applied_shop()
    rows, orders = shop.lake(), shop.folder / "lake" / "shop" / "orders"
    version = DeltaTable(orders).version()
    damage(orders)
    append_change(shop)
    shop.drive("lake", 1_500)

    assert records(shop)[ITEMS].state == TargetState.STREAMING
    assert records(shop)[ITEMS].position == 1_500
    assert records(shop)[ORDERS].state == TargetState.FAILED
    assert str(records(shop)[ORDERS].reason).startswith("CDC-3042 ")
    assert "cdc replay SINK --tables shop.orders" in str(records(shop)[ORDERS].reason)
    assert replay(shop.definition, ReplayOptions(sink="lake", tables=("shop.orders",))).ok
    assert records(shop)[ORDERS].state == TargetState.STREAMING
    assert {row["id"]: row["note"] for row in shop.lake()["shop.orders"]} == {
        row["id"]: "last" if row["id"] == 1 else row["note"] for row in rows["shop.orders"]
    }
    assert DeltaTable(orders).version() > version, "views and kept cuts must not find other rows in a known version"


@pytest.mark.parametrize("writer", ["indexed", "copy-on-write"])
@pytest.mark.parametrize("damage", [data_files_missing, data_files_cut_off])
def test_a_data_file_that_cannot_be_read_stops_its_table_alone(
    tmp_path: Path, damage: Callable[[Path], None], writer: str
) -> None:
    shop = make_shop(tmp_path / "shop")
    with_writer(shop, writer)
    shop.drive("lake")
    damage(shop.folder / "lake" / "shop" / "orders")
    append_change(shop)
    shop.drive("lake", 1_500)

    assert records(shop)[ITEMS].state == TargetState.STREAMING
    assert str(records(shop)[ORDERS].reason).startswith("CDC-3042 ")
    assert replay(shop.definition, ReplayOptions(sink="lake", tables=("shop.orders",))).ok
    assert records(shop)[ORDERS].state == TargetState.STREAMING


def test_a_replay_of_an_older_target_skips_the_versions_that_were_published(tmp_path: Path) -> None:
    shop = make_shop(tmp_path / "shop")
    shop.drive("lake", 1_000)
    orders = shop.folder / "lake" / "shop" / "orders"
    oldest = DeltaTable(orders).version()
    shop.drive("lake")
    rows, published = shop.lake(), DeltaTable(orders).version()
    for version in range(oldest + 1, published + 1):
        (orders / "_delta_log" / f"{version:020d}.json").unlink()
    assert replay(shop.definition, ReplayOptions(sink="lake", tables=("shop.orders",))).ok

    assert shop.lake() == rows
    assert DeltaTable(orders).version() > published + 1
    assert records(shop)[ORDERS].position == END
