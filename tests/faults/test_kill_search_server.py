"""kill -9 of the apply process while it writes to a search server: after a restart every index equals its source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count
from pathlib import Path

import pytest

from cdc.demo.shop_workload import Workload
from cdc.errors import SinkUnavailable
from cdc.targets.search_server.index_names import number_of
from cdc.targets.search_server.reader import SearchServerReader
from tests.faults import index_driver
from tests.faults.test_kill_reader import KILLED, prepare
from tests.fixtures import forked
from tests.fixtures.http_relay import HttpRelay, KillClient, LoseAnswer
from tests.fixtures.pipeline import Pipeline, delete_old_orders
from tests.fixtures.postgres import run_sql
from tests.fixtures.search_sinks import search_sink
from tests.pipelines.sinks.search_server.server_sink import Index, items

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
    delete_old_orders(pipeline.dsn)
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


@pytest.mark.parametrize("failpoint", ["replay_before_table", *(
    pytest.param(point, marks=pytest.mark.slow) for point in ("replay_after_stage", "replay_after_table")
)])  # fmt: skip
def test_a_killed_rebuild_of_an_index_is_begun_again_and_searches_use_the_old_one_meanwhile(
    pipeline: Pipeline, opensearch, failpoint: str
):
    find = search_sink(opensearch)
    prepare(pipeline)
    delete_old_orders(pipeline.dsn)
    run_sql(pipeline.dsn, "ALTER TABLE shop.products ADD COLUMN seen timestamptz DEFAULT '2026-01-01 00:00:00+00'")
    server = {"url": find.access.url, "index": find.access.index}
    sink = {"type": "search", "name": "find", "engine": "opensearch", "server": server, "schema_changes": "rebuild"}
    pipeline.write(sinks=json.dumps([sink | {"tables": ["shop.products", "shop.customers"]}]))
    pipeline.reader()
    driver = pipeline.apply(failpoint)
    pipeline.wait(lambda: states(find) == dict.fromkeys(NUMBERS, "streaming"), "the first copy in the indexes")
    run_sql(pipeline.dsn, "SET timezone = 'UTC'", "ALTER TABLE shop.products ALTER COLUMN seen TYPE timestamp")
    run_sql(
        pipeline.dsn,
        "UPDATE shop.products SET seen = '2026-02-02 00:00:00' WHERE id = (SELECT min(id) FROM shop.products)",
    )
    pipeline.wait(lambda: states(find)["shop.products"] == "failed", "the table has stopped")
    assert pipeline.start("cdc", "tables", "resync", "shop.products").wait(60) == 0, pipeline.output()
    printed = pipeline.folder / "apply.out"
    pipeline.wait(lambda: "cannot build new indexes" in printed.read_text(), "a rebuild that was killed", seconds=40)
    switched = failpoint == "replay_after_table"
    assert numbers(find) == (NUMBERS | {"shop.products": 2} if switched else NUMBERS)
    driver.kill()
    driver.wait()
    pipeline.apply()
    pipeline.wait(lambda: numbers(find) == NUMBERS | {"shop.products": 2}, "a new index of the table")
    pipeline.wait(lambda: states(find) == dict.fromkeys(NUMBERS, "streaming"), "both tables stream")
    envelope = pipeline.verify()
    assert envelope["ok"], f"{envelope}\n{pipeline.output()}"


MAKES_AN_INDEX = r"^PUT /[^/_]+(\?|$)|^PUT /.*/_(alias|mapping)|^POST /_aliases"


@pytest.mark.parametrize("step", index_driver.STEPS)
@pytest.mark.parametrize(
    "carried_out",
    # before a request the server has what it has after the one before it
    [pytest.param(False, id="before", marks=pytest.mark.slow), pytest.param(True, id="after")],
)
def test_a_driver_killed_at_any_request_that_makes_an_index_or_an_alias_is_continued(
    opensearch, opensearch_relay: HttpRelay, tmp_path: Path, step: str, *, carried_out: bool
):
    kills = 0
    for request in count():
        find = search_sink(opensearch, index=f"{opensearch.prefix}{request}.{{schema}}.{{table}}")
        for earlier in index_driver.STEPS[: index_driver.STEPS.index(step)]:
            index_driver.drive(find, earlier)
        if not is_killed_at(request, find.access.index, step, opensearch_relay, tmp_path, carried_out=carried_out):
            break
        kills += 1
        index_driver.drive(find, step)
        expected = {"copy": {"1": "a", "2": "b"}, "column": {"1": "A", "2": "b"}, "replay": {"1": "rebuilt", "2": "b"}}
        assert items(find) == expected[step], f"killed at request {request}"
        assert {key: row["item"] for key, row in Index(find).search().items()} == expected[step]
    assert kills >= {"copy": 3, "column": 2, "replay": 3}[step]


def is_killed_at(request: int, index: str, step: str, relay: HttpRelay, folder: Path, *, carried_out: bool) -> bool:
    """Take a step in a process of its own that is killed at a request; False if it makes fewer such requests."""
    client = Future[int]()
    relay.faults.clear()
    relay.fault(MAKES_AN_INDEX, KillClient(client, carried_out), skip=request)
    with (folder / f"{step}.{request}").open("w+") as output:
        process = forked.start("tests.faults.index_driver", relay.url, index, step, output=output)
        client.set_result(process.pid)
        status = process.wait(60)
        output.seek(0)
        assert status in {0, KILLED}, output.read()
    return status == KILLED


NUMBERS = {"shop.customers": 1, "shop.products": 1}
"""The number of each table's first index."""


def states(find) -> dict[str, str]:
    """Return the state of each table that the sink has published."""
    return {table.topic: table.state for table in published(find)}


def numbers(find) -> dict[str, int]:
    """Return the number of the published index of each table."""
    return {table.topic: number_of(table.target) for table in published(find)}


def published(find):
    try:
        reader = SearchServerReader.open(find)
    except SinkUnavailable:
        return []
    try:
        return [] if reader.published is None else list(reader.published.tables.values())
    finally:
        reader.close()
