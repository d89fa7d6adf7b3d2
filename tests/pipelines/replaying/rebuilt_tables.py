"""Tables that a rebuild fills, on the driver or by Spark, and their rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.table import TableState
from cdc.targets.published_record import Published
from pipelines.replaying.rebuild import LogSource, Rebuild, RebuildContext
from pipelines.replaying.table_sizes_in_log import read_contents
from pipelines.sinks.contract import Sink
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.log.rows import row
from tests.pipelines.shop_pipeline import ITEMS, ShopPipeline, change, delta_rows, schemas

TABLES = [
    pytest.param(("shop.items",), id="whole images"),
    pytest.param(("shop.*",), id="partial images and moved keys", marks=pytest.mark.slow),
]
"""The second takes a job per link of the chain of moves."""


def rebuilt(
    shop: ShopPipeline, sink: Sink, globs: tuple[str, ...], spark: SparkSession | None = None, *, frames: bool = False
) -> Published:
    """The tables built by Spark where there is one, a table in several parts; else on the driver."""
    log = LogReader(shop.folder / "log")
    upto = Position(log.durable or 0)
    tables = read_contents(log, upto, sink=sink.name, globs=globs)
    sink.open(log.log_id)
    limits = {} if spark is None else {"large": 10, "part": 10}
    means = RebuildContext(spark=lambda: spark, executors_can_write=lambda: frames, **limits)  # type: ignore[arg-type, return-value]
    built = Rebuild(LogSource(log, sink.name, globs), sink, means)(tables, upto)
    sink.close()
    return built


def delta(shop: ShopPipeline, name: str, writer: Writer = Writer.AUTO) -> DeltaSink:
    return DeltaSink(DeltaSettings(name=name, path=f"{shop.folder}/{name}/{{schema}}/{{table}}", writer=writer))


def tables_of(built: Published) -> dict[str, list[dict[str, object]]]:
    return {record.topic: delta_rows(record.target, record.version) for record in built.tables.values()}


def copying(shop: ShopPipeline) -> None:
    """A copy of shop.items begins, and of four changes two meet rows that it has not read."""
    begun = replace(schemas()[1], state=TableState.SNAPSHOTTING).to_json()
    said = {"relation": ITEMS, "topic": "shop.items", "key": None, "after": None}
    shop.append(1_500, [row(1_500, 0, op="s", payload=begun, **said)])
    waiting = [
        change(1_600, 0, 90, None, op="d", after=None, of=ITEMS),
        change(1_600, 1, 91, None, op="u", after=[(1, "91")], partial=True, old_key=["90"], of=ITEMS),
        change(1_600, 2, 92, None, op="u", after=[(1, "92")], partial=True, of=ITEMS),
    ]
    owners = [change(1_600, n, n, f"new {n}", of=ITEMS) for n in range(80, 91)]
    shop.append(1_600, [*waiting, *owners, change(1_600, 3, 7, None, op="u", after=[(1, "7")], partial=True, of=ITEMS)])
