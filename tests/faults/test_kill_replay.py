"""kill -9 of a replay: the old target or the new one, and a second run makes it right."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc.demo.shop_workload import Workload
from cdc.failpoint import VARIABLE
from cdc.targets.lake_reader import Lake
from tests.faults.test_kill_reader import KILLED, prepare
from tests.fixtures import forked
from tests.fixtures.pipeline import Pipeline
from tests.pipelines.shop_pipeline import ShopPipeline, delta_rows, make_shop

BEFORE = ["replay_after_stage", "replay_before_table"]
"""Nothing of the old target has changed yet."""
INSIDE = ["replay_after_table", "replay_after_table:2", "replay_before_publish"]
"""Some tables are new, the record still says the old cut."""


@pytest.fixture
def ground(tmp_path: Path) -> ShopPipeline:
    """A log with a history, and a lake of it; its source does not exist."""
    ground = make_shop(tmp_path)
    ground.drive("lake")
    return ground


def run(ground: ShopPipeline, sink: str, failpoint: str | None = None) -> int:
    """`python -m pipelines replay`, as the command starts it."""
    environment = {VARIABLE: failpoint} if failpoint else {}
    command = ("pipelines", "replay", sink, "-c", ground.folder / "shop.yaml")
    return forked.run(*command, environment=environment, timeout=90).status


def damage(table: Path) -> None:
    """What a careless hand does to a Delta table."""
    DeltaTable(str(table)).delete("id < 40")


@pytest.mark.parametrize("failpoint", [INSIDE[0], *(
    pytest.param(point, marks=pytest.mark.slow) for point in ("replay_after_build", *BEFORE, *INSIDE[1:])
)])  # fmt: skip
def test_a_killed_replay_leaves_each_table_old_or_new_and_can_be_run_again(ground: ShopPipeline, failpoint: str):
    right, tables = ground.lake(), [ground.folder / "lake/shop" / name for name in ("orders", "items")]
    for table in tables:
        damage(table)
    wrong = [delta_rows(str(table)) for table in tables]
    assert run(ground, "lake", failpoint) == KILLED
    for table, damaged in zip(tables, wrong, strict=True):
        held = delta_rows(str(table))
        assert held in (damaged, right[f"shop.{table.name}"])
        assert failpoint in INSIDE or held == damaged
    assert ground.lake() == right  # the cut of before is still readable
    assert run(ground, "lake") == 0
    assert [delta_rows(str(table)) for table in tables] == [right["shop.orders"], right["shop.items"]]
    assert ground.lake() == right
    assert not list((ground.folder / "lake/_cdc").glob("replay-*"))
    assert not [found for table in tables for found in table.glob("replay-*/_delta_log")]
    if failpoint not in INSIDE:  # what never was in place is gone; what was belongs to the table's history
        live = {Path(file).parent for table in tables for file in DeltaTable(str(table)).file_uris()}
        assert {found.parent for table in tables for found in table.glob("replay-*/*.parquet")} == live


@pytest.mark.parametrize("failpoint", ["replay_before_publish", *(
    pytest.param(point, marks=pytest.mark.slow)
    for point in ("replay_after_build", "replay_before_table", "replay_after_table")
)])  # fmt: skip
def test_a_killed_replay_leaves_the_old_index_or_the_new_one(ground: ShopPipeline, failpoint: str):
    ground.drive("find", 1_200)
    old = ground.found()
    assert run(ground, "find", failpoint) == KILLED
    after = ground.found()
    assert (after == old) == (failpoint != "replay_after_table")
    assert run(ground, "find") == 0
    new = ground.found()
    shutil.rmtree(ground.folder / "find")
    ground.drive("find")
    assert new == ground.found()


@pytest.mark.slow
def test_a_replay_into_a_folder_that_was_killed_begins_anew_there(ground: ShopPipeline):
    apart = ground.folder / "apart"
    command = ("pipelines", "replay", "lake", "-c", ground.folder / "shop.yaml", "--into", apart)
    assert forked.run(*command, environment={VARIABLE: "replay_after_build"}, timeout=90).status == KILLED
    for expected in (0, 2):  # and once it is finished it is not touched again
        assert forked.run(*command, timeout=90).status == expected
    assert {t.topic: delta_rows(t.target, t.version) for t in Lake.open(f"{apart}/{{table}}").tables()} == ground.lake()


@pytest.mark.slow
def test_a_running_driver_lets_go_for_a_replay_and_goes_on_from_it(pipeline: Pipeline):
    prepare(pipeline)
    lake = f"{{type: delta, name: lake, path: '{pipeline.folder}/lake/{{schema}}/{{table}}'}}"
    find = f"{{type: search, name: find, path: '{pipeline.folder}/find', tables: [shop.products]}}"
    pipeline.write(sinks=f"[{lake}, {find}]")
    pipeline.reader()
    driver = pipeline.apply()
    workload = Workload(pipeline.dsn, rate=50.0, seed=5)
    pipeline.wait((pipeline.folder / "lake/shop/orders/_delta_log").exists, "the first rows in the lake")
    workload.start()
    pipeline.wait_for_more(workload, 50)
    DeltaTable(f"{pipeline.folder}/lake/shop/products").delete("id > 3")
    assert not pipeline.verify()["ok"]
    killed = pipeline.start("pipelines", "replay", "lake", failpoint="replay_before_publish")
    assert killed.wait(90) == KILLED
    for sink in ("lake", "find"):
        assert pipeline.start("pipelines", "replay", sink).wait(90) == 0, pipeline.output()
    pipeline.wait_for_more(workload, 50)
    workload.stop()
    verified = pipeline.verify()
    assert verified["ok"], f"{verified}\n{pipeline.output()}"
    assert driver.poll() is None
