"""A whole pipeline whose log is compacted and trimmed all the time: its sinks equal the source in spite of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cdc.demo.shop_workload import Workload
from cdc.log import consumers
from cdc.log.consumers import Consumer
from cdc.log.reader import LogReader
from cdc.position import Position
from tests.faults.test_kill_reader import prepare
from tests.fixtures import forked
from tests.fixtures.pipeline import Pipeline

SMALL = "segment: {bytes: 64KiB, every: 1s}, compact: {every: 3s}, retain: {max: 1h, grace: 1m}"


@pytest.fixture(name="shop")
def _shop(pipeline: Pipeline) -> Iterator[tuple[Pipeline, Workload]]:
    prepare(pipeline)
    lake = f"{{type: delta, name: lake, path: '{pipeline.folder}/lake/{{schema}}/{{table}}'}}"
    find = f"{{type: search, name: find, path: '{pipeline.folder}/find', tables: [shop.products]}}"
    pipeline.write(sinks=f"[{lake}, {find}]")
    text = pipeline.definition.read_text()
    path = f"log: {{path: '{pipeline.log}'"
    assert path in text
    pipeline.definition.write_text(text.replace(path, f"{path}, {SMALL}"))
    workload = Workload(pipeline.dsn, rate=200.0, seed=11)
    yield pipeline, workload
    workload.stop()


def cdc(pipeline: Pipeline, *command: str) -> dict[str, Any]:
    """A command's envelope."""
    words, environment = (*command, "-c", pipeline.definition, "--json"), {"CDC_TEST_DSN": pipeline.dsn}
    done = forked.run("cdc", *words, environment=environment, timeout=180)
    assert done.output.strip(), done.errors
    envelope: dict[str, Any] = json.loads(done.output.strip().splitlines()[-1])
    return envelope


def assert_equal(pipeline: Pipeline) -> None:
    """Every table of every sink equals the source."""
    envelope = pipeline.verify()
    assert envelope["ok"], f"{envelope}\n{pipeline.output()}"


def wait_for_trim(pipeline: Pipeline) -> None:
    """Until more is trimmed than now."""
    before = LogReader(pipeline.log).oldest
    pipeline.wait(lambda: LogReader(pipeline.log).oldest > before, f"a trim behind {before}")


@pytest.mark.slow
def test_sinks_and_their_replays_over_a_log_that_is_trimmed_all_the_time_equal_the_source(
    shop: tuple[Pipeline, Workload],
) -> None:
    pipeline, workload = shop
    pipeline.reader()
    pipeline.apply()
    pipeline.wait_for_copy()
    workload.start()
    for _ in range(2):
        wait_for_trim(pipeline)
    assert_equal(pipeline)
    assert {consumer.name for consumer in consumers.list_consumers(pipeline.log)} == {"lake", "find"}
    for sink in ("lake", "find"):
        assert cdc(pipeline, "replay", sink)["ok"], pipeline.output()
    workload.stop()
    assert_equal(pipeline)


@pytest.mark.slow
def test_a_sink_that_begins_behind_the_first_trim_equals_the_source(shop: tuple[Pipeline, Workload]) -> None:
    pipeline, workload = shop
    pipeline.reader()
    pipeline.wait_for_copy()
    workload.start()
    pipeline.wait_for_more(workload, 300)
    consumers.register(pipeline.log, Consumer("gone", "gone", Position(1 << 60)))
    assert cdc(pipeline, "log", "compact")["ok"]
    wait_for_trim(pipeline)
    driver = pipeline.apply()
    pipeline.wait(lambda: pipeline.reports(driver), "the driver is up")
    pipeline.wait((pipeline.folder / "lake").exists, "a lake")
    assert_equal(pipeline)
    workload.stop()
    assert_equal(pipeline)
    listed = cdc(pipeline, "log", "ls")["result"]
    assert Position.parse(listed["oldest"]) <= Position.parse(listed["horizon"])
    assert cdc(pipeline, "status")["result"]["problems"] == []
