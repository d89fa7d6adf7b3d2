"""What the log contains of each table, for one sink."""

from __future__ import annotations

from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.replaying.table_sizes_in_log import read_contents
from tests.pipelines.shop_pipeline import ITEMS, ShopPipeline, change


def test_rows_addressed_to_another_sink_are_not_counted(shop: ShopPipeline) -> None:
    shop.append(1_500, [change(1_500, 0, 9, "x", address="elsewhere", of=ITEMS)])
    log = LogReader(shop.folder / "log")
    assert [t.rows for t in read_contents(log, Position(1_500), sink="lake", globs=("shop.*",))] == [57, 23]
    assert [t.rows for t in read_contents(log, Position(1_500), sink="elsewhere", globs=("shop.*",))] == [57, 24]
