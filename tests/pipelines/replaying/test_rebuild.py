"""Rebuild: however a table is built, on the driver, by executors or in parts, it is the same table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.stores.published import Published, TargetState
from cdc.stores.search_index import SearchIndex
from cdc.table import TableState
from pipelines.replaying.log_contents import read_contents
from pipelines.replaying.rebuild import LogSource, Rebuild, RebuildContext, group_tables
from pipelines.runtime.session import has_delta
from pipelines.sinks.contract import Sink
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.search.sink import SearchSink
from tests.log.rows import row
from tests.pipelines.replayed import END, ITEMS, ORDERS, Ground, change, delta_rows, made, schemas


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    """A log with a history; its source does not exist."""
    return made(tmp_path)


TABLES = [
    pytest.param(("shop.items",), id="whole images"),
    pytest.param(("shop.*",), id="partial images and moved keys", marks=pytest.mark.slow),
]
"""The second takes a job per link of the chain of moves."""


def rebuilt(
    ground: Ground, sink: Sink, globs: tuple[str, ...], spark: SparkSession | None = None, *, frames: bool = False
) -> Published:
    """The tables built by Spark where there is one, a table in several parts; else on the driver."""
    log = LogReader(ground.folder / "log")
    upto = Position(log.durable or 0)
    tables = read_contents(log, upto, sink=sink.name, globs=globs)
    sink.open(log.log_id)
    limits = {} if spark is None else {"large": 10, "part": 10}
    means = RebuildContext(spark=lambda: spark, frames=lambda: frames, **limits)  # type: ignore[arg-type, return-value]
    built = Rebuild(LogSource(log, sink.name, globs), sink, means)(tables, upto)
    sink.close()
    return built


def delta(ground: Ground, name: str, writer: Writer = Writer.AUTO) -> DeltaSink:
    return DeltaSink(DeltaSettings(name=name, path=f"{ground.folder}/{name}/{{schema}}/{{table}}", writer=writer))


def tables_of(built: Published) -> dict[str, list[dict[str, object]]]:
    return {record.topic: delta_rows(record.target, record.version) for record in built.tables.values()}


def test_the_driver_builds_what_applying_builds(ground: Ground) -> None:
    ground.drive("lake")
    assert tables_of(rebuilt(ground, delta(ground, "other"), ("shop.*",))) == ground.lake()


@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize("writer", [Writer.AUTO, Writer.SPARK])
@pytest.mark.parametrize("globs", TABLES)
def test_executors_build_what_the_driver_builds(
    spark: SparkSession, ground: Ground, globs: tuple[str, ...], writer: Writer
) -> None:
    right = tables_of(rebuilt(ground, delta(ground, "plain"), globs))
    sink = delta(ground, "large", writer)
    sink.attach(spark)
    built = rebuilt(ground, sink, globs, spark, frames=True)
    assert tables_of(built) == right
    assert {record.state for record in built.tables.values()} == {TargetState.STREAMING}


@pytest.mark.slow
def test_parts_build_what_the_driver_builds(spark: SparkSession, ground: Ground) -> None:
    right = tables_of(rebuilt(ground, delta(ground, "plain"), ("shop.*",)))
    assert tables_of(rebuilt(ground, delta(ground, "parts", Writer.DELTA_RS), ("shop.*",), spark)) == right


@pytest.mark.parametrize("globs", TABLES)
def test_an_index_is_built_in_parts(spark: SparkSession, ground: Ground, globs: tuple[str, ...]) -> None:
    rebuilt(ground, SearchSink("whole", ground.folder / "whole"), globs)
    built = rebuilt(ground, SearchSink("find", ground.folder / "find"), globs, spark)
    assert ground.found() == ground.found("whole")
    assert SearchIndex.open(ground.folder / "find").published == built


def copying(ground: Ground) -> None:
    """A copy of shop.items begins, and of four changes two meet rows that it has not read."""
    begun = replace(schemas()[1], state=TableState.SNAPSHOTTING).to_json()
    said = {"relation": ITEMS, "topic": "shop.items", "key": None, "after": None}
    ground.append(1_500, [row(1_500, 0, op="s", payload=begun, **said)])
    waiting = [
        change(1_600, 0, 90, None, op="d", after=None, of=ITEMS),
        change(1_600, 1, 91, None, op="u", after=[(1, "91")], partial=True, old_key=["90"], of=ITEMS),
        change(1_600, 2, 92, None, op="u", after=[(1, "92")], partial=True, of=ITEMS),
    ]
    owners = [change(1_600, n, n, f"new {n}", of=ITEMS) for n in range(80, 91)]
    ground.append(
        1_600, [*waiting, *owners, change(1_600, 3, 7, None, op="u", after=[(1, "7")], partial=True, of=ITEMS)]
    )


def test_of_a_table_that_is_being_copied_what_is_there_is_built(ground: Ground) -> None:
    copying(ground)
    ground.drive("lake", 1_600)
    built = rebuilt(ground, delta(ground, "other"), ("shop.*",))
    assert tables_of(built) == ground.lake()
    assert [row["id"] for row in tables_of(built)["shop.items"]] == [7, 8, *range(80, 91)]
    states = {relation: record.state for relation, record in built.tables.items()}
    assert states == {ORDERS: TargetState.STREAMING, ITEMS: TargetState.SNAPSHOTTING}


@pytest.mark.slow
def test_of_a_table_that_is_being_copied_parts_build_what_the_driver_builds(
    spark: SparkSession, ground: Ground
) -> None:
    copying(ground)
    right = tables_of(rebuilt(ground, delta(ground, "plain"), ("shop.items",)))
    built = rebuilt(ground, delta(ground, "parts", Writer.DELTA_RS), ("shop.items",), spark)
    assert tables_of(built) == right
    assert built.tables[ITEMS].state == TargetState.SNAPSHOTTING


@pytest.mark.slow
def test_a_value_that_does_not_fit_is_parked_alone_also_on_executors(spark: SparkSession, ground: Ground) -> None:
    ground.append(1_500, [change(1_500, 0, 9, "x", after=[(1, "not a number"), (2, "x")], op="u")])
    log = LogReader(ground.folder / "log")
    tables = read_contents(log, Position(1_500), sink="lake", globs=("shop.*",))
    sink = delta(ground, "lake")
    sink.open(log.log_id)
    means = RebuildContext(spark=lambda: spark, frames=lambda: has_delta(spark), large=30, part=20)
    built = Rebuild(LogSource(log, "lake", ("shop.*",)), sink, means)(tables, Position(1_500))
    assert {record.state for record in built.tables.values()} == {TargetState.STREAMING}
    assert {relation: record.parked for relation, record in built.tables.items()} == {ORDERS: (("9",),), ITEMS: ()}
    assert 9 not in {row["id"] for row in tables_of(built)["shop.orders"]}


def test_small_tables_share_a_group_and_a_large_one_is_alone(ground: Ground) -> None:
    log = LogReader(ground.folder / "log")
    orders, items = read_contents(log, Position(END), sink="lake", globs=("shop.*",))
    assert (orders.relation, orders.rows, items.rows) == (ORDERS, 57, 23)
    assert group_tables([orders, items], 80) == [[orders, items]]
    assert group_tables([orders, items], 79) == [[orders], [items]]
    assert group_tables([orders, items], 10) == [[orders], [items]]


def test_rows_addressed_to_another_sink_are_not_counted(ground: Ground) -> None:
    ground.append(1_500, [change(1_500, 0, 9, "x", address="elsewhere", of=ITEMS)])
    log = LogReader(ground.folder / "log")
    assert [t.rows for t in read_contents(log, Position(1_500), sink="lake", globs=("shop.*",))] == [57, 23]
    assert [t.rows for t in read_contents(log, Position(1_500), sink="elsewhere", globs=("shop.*",))] == [57, 24]


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_a_value_that_a_later_change_replaced_stops_nothing(spark: SparkSession, ground: Ground) -> None:
    ground.append(1_500, [change(1_500, 0, 9, "x", after=[(1, "not a number"), (2, "x")], op="u", of=ITEMS)])
    ground.append(1_600, [change(1_600, 0, 9, "right", op="u", of=ITEMS)])
    log = LogReader(ground.folder / "log")
    tables = read_contents(log, Position(1_600), sink="lake", globs=("shop.items",))
    sink = delta(ground, "lake")
    sink.open(log.log_id)
    means = RebuildContext(spark=lambda: spark, frames=lambda: True, large=10, part=20)
    built = Rebuild(LogSource(log, "lake", ("shop.*",)), sink, means)(tables, Position(1_600))
    assert [(row["id"], row["note"]) for row in tables_of(built)["shop.items"]] == [
        (7, "later"),
        (8, "too"),
        (9, "right"),
    ]
