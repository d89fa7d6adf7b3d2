"""kill -9 of the apply process while it writes to a search server: after a restart every index equals its source."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cdc.demo.shop_workload import Workload
from tests.faults.test_kill_reader import KILLED, prepare
from tests.fixtures.http_relay import HttpRelay, LoseAnswer
from tests.fixtures.pipeline import Pipeline

FAILPOINTS = [
    "search_before_rows:2",
    "search_after_rows:3",
    "search_before_refresh:2",
    "search_before_commit:2",
    "search_after_commit:2",
]


@pytest.fixture(name="shop")
def _shop(pipeline: Pipeline, opensearch, opensearch_relay: HttpRelay) -> Iterator[tuple[Pipeline, Workload]]:
    prepare(pipeline)
    server = {"url": opensearch_relay.url, "index": f"{opensearch.prefix}{{schema}}.{{table}}"}
    find = {"type": "search", "name": "find", "engine": "opensearch", "server": server}
    tables = ["shop.orders", "shop.notes", "shop.products"]
    pipeline.write(sinks=json.dumps([find | {"tables": tables}]))
    workload = Workload(pipeline.dsn, rate=25.0, seed=11)
    yield pipeline, workload
    workload.stop()
    opensearch_relay.faults.clear()


def test_a_driver_killed_at_one_failpoint_after_the_other_leaves_the_indexes_exact(
    shop: tuple[Pipeline, Workload], opensearch_relay: HttpRelay
):
    pipeline, workload = shop
    pipeline.reader()
    pipeline.wait_for_copy()
    workload.start()
    opensearch_relay.fault(r"^(PUT|POST) ", LoseAnswer(), times=None, probability=0.05)
    for failpoint in FAILPOINTS:
        assert pipeline.apply(failpoint).wait(90) == KILLED, f"{failpoint}\n{pipeline.output()}"
    driver = pipeline.apply()
    pipeline.wait(lambda: pipeline.reports(driver), "the driver is up again")
    envelope = pipeline.verify()
    assert envelope["ok"], f"{envelope}\n{pipeline.output()}"
    workload.stop()
    envelope = pipeline.verify()
    assert envelope["ok"], f"{envelope}\n{pipeline.output()}"
