"""kill -9 of the Spark driver under load: after a restart every target equals its source."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from random import Random

import pytest

from cdc.demo.shop_workload import Workload
from tests.faults.test_kill_reader import KILLED, prepare
from tests.fixtures.pipeline import Pipeline, delete_old_orders

FAILPOINTS = [
    "after_fold:2",
    "delta_indexed_after_files:2",
    "delta_indexed_before_commit:3",
    "delta_indexed_after_commit:2",
    "delta_indexed_after_index:3",
    "after_table_merge:3",
    "before_publish:2",
]
FEW = "shop.orders, shop.notes, shop.products"
"""With rows that come, change, move and go, and values that updates do not send: each driver merges every table."""


@pytest.fixture(name="shop")
def _shop(pipeline: Pipeline) -> Iterator[tuple[Pipeline, Workload]]:
    prepare(pipeline)
    delete_old_orders(pipeline.dsn)
    write(pipeline, "'*.*'")
    workload = Workload(pipeline.dsn, rate=25.0, seed=11)
    yield pipeline, workload
    workload.stop()


def write(pipeline: Pipeline, tables: str) -> None:
    """The definition of two sinks; tables: those of the lake, as YAML flow text."""
    lake = f"{{type: delta, name: lake, path: '{pipeline.folder}/lake/{{schema}}/{{table}}', tables: [{tables}]}}"
    find = f"{{type: search, name: find, path: '{pipeline.folder}/find', tables: [shop.products]}}"
    pipeline.write(sinks=f"[{lake}, {find}]")


def assert_equal(pipeline: Pipeline) -> None:
    """Every table of every sink equals the source."""
    envelope = pipeline.verify()
    assert envelope["ok"], f"{envelope}\n{pipeline.output()}"


def test_a_driver_killed_at_one_failpoint_after_the_other_leaves_the_targets_exact(shop: tuple[Pipeline, Workload]):
    """In one life: each driver begins with what the one before it left in the targets."""
    pipeline, workload = shop
    write(pipeline, FEW)
    pipeline.reader()
    pipeline.wait_for_copy()
    workload.start()
    for failpoint in FAILPOINTS:
        assert pipeline.apply(failpoint).wait(90) == KILLED, f"{failpoint}\n{pipeline.output()}"
    driver = pipeline.apply()
    pipeline.wait(lambda: pipeline.reports(driver), "the driver is up again")
    assert_equal(pipeline)
    workload.stop()
    assert_equal(pipeline)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_reader_and_driver_killed_at_random_moments_leave_the_targets_exact(shop: tuple[Pipeline, Workload], seed: int):
    pipeline, workload = shop
    random = Random(seed)
    processes = {"reader": pipeline.reader(), "apply": pipeline.apply()}
    pipeline.wait((pipeline.folder / "lake").exists, "the first rows in the lake")
    workload.start()
    for _ in range(3):
        pipeline.wait_for_more(workload, random.randint(20, 300))
        for name in random.choice([("reader",), ("apply",), ("reader", "apply")]):
            processes[name].send_signal(signal.SIGKILL)
            processes[name].wait()
            processes[name] = pipeline.reader() if name == "reader" else pipeline.apply()
    workload.stop()
    pipeline.wait(lambda: pipeline.reports(processes["apply"]), "the driver is up again")
    assert_equal(pipeline)
