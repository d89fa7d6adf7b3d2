"""A damaged file is given up: the tables in it stand still until they are copied anew, the others never notice."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdc.catalog import Catalog
from cdc.log.audit.drop_file import DamagedFile
from cdc.log.reader import LogReader
from cdc.table import TableSchema, TableState
from cdc.targets.published_record import TargetState
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from tests.log.rows import row
from tests.pipelines.cold_log import EACH_OF_ITS_OWN
from tests.pipelines.shop_pipeline import END, FIGURES, ORDERS, Rows, ShopPipeline, change, make_shop, schemas

COPIED = END + 80
"""Where the copy of shop.orders begins, after the log has lost some of its rows."""
LOST = 1_100
"""The transaction of shop.orders that is lost."""


def version(position: int, ordinal: int, schema: TableSchema) -> dict[str, Any]:
    return row(position, ordinal, op="s", relation=ORDERS, key=None, after=None, payload=schema.to_json())


def copied(ground: ShopPipeline) -> None:
    """Copy shop.orders anew, as `cdc tables resync` does."""
    orders, _ = schemas()
    ground.append(COPIED, [version(COPIED, 0, replace(orders, state=TableState.SNAPSHOTTING))])
    ground.append(COPIED + 8, [change(COPIED + 8, n, n, f"copied {n}", op="r") for n in range(40)])
    end = row(COPIED + 16, 1, op="g", relation=ORDERS, key=None, after=None, payload=str(COPIED).encode())
    ground.append(COPIED + 16, [version(COPIED + 16, 0, orders), end])


def driven(ground: ShopPipeline, sink: str) -> dict[str, str]:
    """Bring a sink to the log's end in the shortest batches; the state of the tables that stayed behind."""
    wanted = next(one for one in ground.definition.sinks if one.name == sink)
    log = LogReader(ground.definition.log.root)
    with Catalog.open(ground.definition.catalog.url) as catalog, closing(build_sink(wanted)) as target:
        fold, progress = RangeFolder(log, sink, wanted.tables), SinkFigures("shop", sink, FIGURES)
        loop = SinkLoop(target, fold, CutRequests(catalog, "shop"), progress)
        loop.open()
        while (end := log.latest_boundary(loop.position, 1)) > loop.position:
            loop(None, end)
        behind = {table.topic: table.state for table in loop.lagging_tables}
        if loop.needs_reopen:
            for table in loop.lagging_tables:
                # a small range, for which no session is asked
                loop.catch_up(table, None)
        loop.drain()
        return behind


def held(ground: ShopPipeline, sink: str) -> Rows:
    return ground.lake() if sink == "lake" else ground.found()


@pytest.mark.parametrize("sink", ["lake", pytest.param("find", marks=pytest.mark.slow)])
def test_a_sink_is_told_of_lost_rows_and_holds_what_it_should_once_the_table_is_copied(tmp_path: Path, sink: str):
    whole, ground = (make_shop(tmp_path / name, EACH_OF_ITS_OWN) for name in ("whole", "hurt"))
    root = ground.definition.log.root
    file = next(f.path for f in LogReader(root).every_file() if f.first == LOST)
    Path(file).write_bytes(Path(file).read_bytes()[:-20])
    assert DamagedFile.find(root, file).drop().marked == ("shop.orders",)
    driven(whole, sink)
    assert driven(ground, sink) == {"shop.orders": TargetState.FAILED}
    assert held(ground, sink)["shop.items"] == held(whole, sink)["shop.items"]

    for one in (whole, ground):
        copied(one)
        driven(one, sink)
    assert held(ground, sink) == held(whole, sink)
    assert len(held(ground, sink)["shop.orders"]) == 40


def test_a_sink_that_had_read_them_keeps_what_it_holds(tmp_path: Path):
    ground = make_shop(tmp_path / "hurt", EACH_OF_ITS_OWN)
    driven(ground, "lake")
    right = ground.lake()
    root = ground.definition.log.root
    file = next(f.path for f in LogReader(root).every_file() if f.first == LOST)
    Path(file).unlink()
    DamagedFile.find(root, file).drop()
    driven(ground, "lake")
    assert ground.lake() == right
