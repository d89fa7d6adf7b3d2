"""Targets that are older than the published record: restored from a copy, or without their last commits.

Each is merged again from its own `txn`, so that it ends equal to a target that was never touched.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc.errors import SinkUnavailable
from cdc.position import Position
from cdc.table import Column
from cdc.targets.published_record import Published, TargetState
from pipelines.sinks.delta.settings import Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, batch, gone, put
from tests.log.rows import row
from tests.pipelines.shop_pipeline import END, ITEMS, change, make_shop, schemas
from tests.pipelines.shop_pipeline import ORDERS as RELATION
from tests.pipelines.sinks.added_features import LOG, filled_sink, items_by_id, sink_settings


def last_commit(table: Path) -> Path:
    """The commit file of the newest version."""
    return max((table / "_delta_log").glob("*.json"))


def older_copy(table: Path, copy: Path) -> None:
    shutil.rmtree(table)
    shutil.copytree(copy, table)


def emptied(table: Path, _copy: Path) -> None:
    last_commit(table).write_bytes(b"")


def missing(table: Path, _copy: Path) -> None:
    last_commit(table).unlink()


def short(table: Path, _copy: Path) -> None:
    commit = last_commit(table)
    commit.write_bytes(b"".join(commit.read_bytes().splitlines(keepends=True)[:-1]))


def without_a_data_file(table: Path, _copy: Path) -> None:
    newest = max(table.glob("part-*.parquet"), key=lambda file: file.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "restored from an older copy": older_copy,
    "last commit empty": emptied,
    "last commit missing": missing,
    "last commit cut off after a line": short,
    "last data file cut off": without_a_data_file,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("later", [False, True], ids=["at once", "with later changes"])
def test_a_target_behind_the_published_cut_is_merged_again_from_its_own_position(
    tmp_path: Path, damage: Callable[[Path, Path], None], *, later: bool
) -> None:
    shop, undamaged = make_shop(tmp_path / "shop"), make_shop(tmp_path / "undamaged")
    orders, copy = shop.folder / "lake" / "shop" / "orders", tmp_path / "copy"
    shop.drive("lake", 1_000)
    shutil.copytree(orders, copy)
    shop.drive("lake", 1_200 if later else END)
    published = shop.lake_of().tables()
    damage(orders, copy)
    shop.drive("lake")
    undamaged.drive("lake")

    assert shop.lake() == undamaged.lake()
    record = next(table for table in shop.lake_of().tables() if table.relation == RELATION)
    before = next(table for table in published if table.relation == RELATION)
    assert (record.state, record.position) == (TargetState.STREAMING, END)
    assert record.version is not None
    assert before.version is not None
    assert record.version > before.version, "a version that a kept cut names must not get other rows"


def test_no_version_between_the_copy_and_the_published_one_can_be_read(tmp_path: Path) -> None:
    shop = make_shop(tmp_path / "shop")
    orders = shop.folder / "lake" / "shop" / "orders"
    shop.drive("lake", 1_000)
    shutil.copytree(orders, tmp_path / "copy")
    oldest = DeltaTable(orders).version()
    shop.drive("lake", 1_200)
    published = DeltaTable(orders).version()
    older_copy(orders, tmp_path / "copy")
    shop.drive("lake")

    assert DeltaTable(orders, version=oldest).version() == oldest
    for version in range(oldest + 1, published + 1):
        with pytest.raises(DeltaError):
            DeltaTable(orders, version=version)


def test_a_restored_target_gets_the_columns_and_defaults_that_came_since(tmp_path: Path) -> None:
    shop, undamaged = make_shop(tmp_path / "shop"), make_shop(tmp_path / "undamaged")
    for pipeline in (shop, undamaged):
        pipeline.drive("lake")
    shutil.copytree(shop.folder / "lake" / "shop" / "items", tmp_path / "copy")
    _, items = schemas()
    size = Column(id=3, name="size", type_oid=25, type_name="text", missing="medium")
    wider = replace(items, columns=(*items.columns, size))
    version = row(1_500, 0, op="s", relation=ITEMS, topic=items.topic, key=None, after=None, payload=wider.to_json())
    nine = change(1_500, 1, 9, None, of=ITEMS, after=[(1, "9"), (2, "nine"), (3, "large")])
    for pipeline in (shop, undamaged):
        pipeline.append(1_500, [version, nine, change(1_500, 2, 3, "three")])
        pipeline.drive("lake", 1_500)
    older_copy(shop.folder / "lake" / "shop" / "items", tmp_path / "copy")
    shop.drive("lake", 1_500)

    assert shop.lake() == undamaged.lake()
    assert {item["size"] for item in shop.lake()["shop.items"]} == {"medium", "large"}


def sink_with_a_copy(folder: Path, writer: Writer) -> tuple[DeltaSink, str]:
    """Return a sink that published a batch after its target was copied to `folder`/copy, and the target's path."""
    sink, uri = filled_sink(folder, writer)
    shutil.copytree(uri, folder / "copy")
    record = sink.apply(batch([put(4, "d", 30), gone(1, 31)], 20, 40))
    sink.publish(Published(40, 0, {record.relation: record}))
    return sink, uri


@pytest.mark.parametrize("writer", [Writer.INDEXED, Writer.COPY_ON_WRITE])
def test_a_directory_replaced_under_a_running_sink_is_noticed_before_the_next_commit(
    tmp_path: Path, writer: Writer
) -> None:
    sink, uri = sink_with_a_copy(tmp_path, writer)
    older_copy(Path(uri), tmp_path / "copy")
    version = DeltaTable(uri).version()

    with pytest.raises(SinkUnavailable, match="was replaced while the sink wrote to it"):
        sink.apply(batch([put(5, "e", 50)], 40, 60))
    assert DeltaTable(uri).version() == version
    sink.close()
    again = DeltaSink(sink_settings(tmp_path, writer))
    opened = again.open(LOG)
    assert opened is not None
    table = opened.tables[ORDERS.relation]
    assert (table.position, table.state) == (20, TargetState.CATCHING_UP)
    again.apply(batch([put(4, "d", 30), gone(1, 31), put(5, "e", 50)], 20, 60))
    assert items_by_id(uri) == {2: "b", 3: "c", 4: "d", 5: "e"}


@pytest.mark.parametrize("writer", [Writer.INDEXED, Writer.COPY_ON_WRITE])
def test_a_directory_replaced_between_the_start_of_a_sink_and_its_first_batch_is_noticed(
    tmp_path: Path, writer: Writer
) -> None:
    sink, uri = sink_with_a_copy(tmp_path, writer)
    sink.close()
    again = DeltaSink(sink_settings(tmp_path, writer))
    again.open(LOG)
    older_copy(Path(uri), tmp_path / "copy")
    version = DeltaTable(uri).version()

    with pytest.raises(SinkUnavailable, match="was replaced while the sink wrote to it"):
        again.apply(batch([put(5, "e", 50)], 40, 60))
    assert DeltaTable(uri).version() == version
    opened = again.open(LOG)
    assert opened is not None
    again.apply(batch([put(4, "d", 30), gone(1, 31), put(5, "e", 50)], 20, 60))
    assert items_by_id(uri) == {2: "b", 3: "c", 4: "d", 5: "e"}


def test_a_directory_replaced_by_one_with_as_many_commits_is_noticed_too(tmp_path: Path) -> None:
    sink, uri = filled_sink(tmp_path, Writer.INDEXED)
    sink.apply(batch([put(4, "d", 30)], 20, 40))
    sink.parts.targets.by_uri[uri].refresh()
    shutil.copytree(uri, tmp_path / "copy")
    older_copy(Path(uri), tmp_path / "copy")

    with pytest.raises(SinkUnavailable, match="another one"):
        sink.apply(batch([put(5, "e", 50)], 40, 60))


def test_a_driver_that_dies_between_two_older_targets_leaves_the_second_one_behind(tmp_path: Path) -> None:
    shop, undamaged = make_shop(tmp_path / "shop"), make_shop(tmp_path / "undamaged")
    shop.drive("lake", 1_000)
    shutil.copytree(shop.folder / "lake" / "shop", tmp_path / "copy")
    shop.drive("lake", 1_300)
    older_copy(shop.folder / "lake" / "shop", tmp_path / "copy")
    with shop.opened("lake") as loop:
        first, second = loop.lagging_tables
        loop.catch_up(first, None)
        loop(None, Position(END))  # a batch of the others does not merge into the second one
    behind = next(table for table in shop.lake_of().tables() if table.relation == second.relation)
    assert (behind.position, behind.state) == (1_000, TargetState.CATCHING_UP)
    shop.drive("lake")
    undamaged.drive("lake")

    assert shop.lake() == undamaged.lake()


def test_a_whole_lake_put_back_is_right(tmp_path: Path) -> None:
    shop, undamaged = make_shop(tmp_path / "shop"), make_shop(tmp_path / "undamaged")
    shop.drive("lake", 1_100)
    shutil.copytree(shop.folder / "lake", tmp_path / "copy")
    shop.drive("lake", 1_300)
    older_copy(shop.folder / "lake", tmp_path / "copy")
    shop.drive("lake")
    undamaged.drive("lake")

    assert shop.lake() == undamaged.lake()
