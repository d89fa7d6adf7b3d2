"""Rules and rebuilding: however a table with a rule is built, it is what applying the log makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from cdc.config import Secret, SinkRule
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.published_record import Published, TargetState
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.rebuild import LogSource, Rebuild, RebuildContext
from pipelines.replaying.replay import replay
from pipelines.replaying.table_sizes_in_log import read_contents
from pipelines.runtime.spark_session import has_delta
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.pipelines.shop_pipeline import END, ShopPipeline, change, delta_rows

SALT = Secret("pepper", {"env": "SALT"})
MASKED: dict[str, Any] = {"transform": {"rename": {"note": "words"}, "mask": {"note": "sha256"}, "salt": SALT}}
COMPUTED: dict[str, Any] = {"transform": {"computed": {"shelf": "substr(note, 1, 2)"}, "where": "id <> 8"}}
PARTED: dict[str, Any] = {"partition_by": ["note"], "properties": {"delta.enableChangeDataFeed": "true"}}
RULES = {"masked": MASKED, "computed": COMPUTED, "parted": PARTED, "both": {**COMPUTED, "partition_by": ["shelf"]}}


def sink_of(shop: ShopPipeline, name: str, rule: dict[str, Any], writer: Writer = Writer.AUTO) -> DeltaSink:
    rules = (SinkRule.model_validate({"match": "*.*", **rule}),)
    return DeltaSink(DeltaSettings(name, f"{shop.folder}/{name}/{{schema}}/{{table}}", writer, rules=rules))


def rebuilt(shop: ShopPipeline, sink: DeltaSink, spark: SparkSession, large: int = 1_000) -> Published:
    log = LogReader(shop.folder / "log")
    upto = Position(log.durable or 0)
    tables = read_contents(log, upto, sink=sink.name, globs=("shop.items",))
    sink.attach(spark)
    sink.open(log.log_id)
    means = RebuildContext(spark=lambda: spark, executors_can_write=lambda: has_delta(spark), large=large, part=10)
    built = Rebuild(LogSource(log, sink.name, ("shop.items",)), sink, means)(tables, upto)
    sink.close()
    return built


def rows_of(built: Published) -> list[dict[str, Any]]:
    (record,) = built.tables.values()
    assert record.state == TargetState.STREAMING, record.reason
    return delta_rows(record.target, record.version)


@pytest.mark.parametrize("writer", [Writer.AUTO, pytest.param(Writer.SPARK, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "rule", ["masked", *(pytest.param(name, marks=pytest.mark.slow) for name in ("computed", "both"))]
)
def test_executors_make_of_a_table_what_the_driver_makes(
    spark: SparkSession, shop: ShopPipeline, rule: str, writer: Writer
) -> None:
    right = rows_of(rebuilt(shop, sink_of(shop, "small", RULES[rule]), spark))
    assert [len(row) for row in right][:1] == [4 if rule == "masked" else 5]
    assert rows_of(rebuilt(shop, sink_of(shop, "large", RULES[rule], writer), spark, large=1)) == right


def with_rule(shop: ShopPipeline, rule: dict[str, Any]) -> ShopPipeline:
    (lake, *rest) = shop.definition.sinks
    said = SinkRule.model_validate({"match": "shop.orders", **rule})
    sinks = (lake.model_copy(update={"rules": (said,), "tables": ("shop.orders",)}), *rest)
    return replace(shop, definition=shop.definition.model_copy(update={"sinks": sinks}))


def state(shop: ShopPipeline) -> tuple[str, str | None, list[dict[str, Any]]]:
    (record,) = shop.lake_of().tables()
    return record.state, record.reason, delta_rows(record.target, record.version)


def test_a_replay_puts_rows_of_another_rule_in_place(shop: ShopPipeline) -> None:
    with_rule(shop, {}).drive("lake", 1_200)
    masked = with_rule(shop, MASKED)
    masked.drive("lake")
    stopped, reason, before = state(masked)
    assert (stopped, "written with another transform" in (reason or "")) == (TargetState.FAILED, True)
    assert "words" not in before[0]

    assert replay(masked.definition, ReplayOptions(sink="lake")).ok
    _, _, after = state(masked)
    assert {len(row["words"]) for row in after} == {64}
    masked.append(END + 100, [change(END + 100, 0, 3, None, op="u", after=[(1, "3")], partial=True)])
    masked.drive("lake", END + 100)
    now, reason, rows = state(masked)
    assert (now, reason) == (TargetState.STREAMING, None)
    assert [row["words"] for row in rows] == [row["words"] for row in after]


def test_a_replay_keeps_partitions_and_goes_where_the_rule_says(shop: ShopPipeline) -> None:
    path = f"{shop.folder}/elsewhere/of {{table}}"
    parted = with_rule(shop, {**PARTED, "path": path})
    shop.append(END + 50, [change(END + 50, 0, 60, "a b/c=d%20ü")])
    parted.drive("lake", END + 50)
    _, _, right = state(parted)
    folder = f"{shop.folder}/elsewhere/of orders"
    DeltaTable(folder).delete("id < 20")
    assert replay(parted.definition, ReplayOptions(sink="lake")).ok
    _, _, after = state(parted)

    assert after == right
    assert DeltaTable(folder).metadata().partition_columns == ["note"]
    parted.append(
        END + 100, [change(END + 100, 0, 60, "moved", op="u"), change(END + 100, 1, 5, None, op="d", after=None)]
    )
    parted.drive("lake", END + 100)
    assert {row["id"]: row["note"] for row in state(parted)[2]} == {
        **{row["id"]: row["note"] for row in right if row["id"] != 5},
        60: "moved",
    }


def test_a_replay_into_a_directory_stays_inside_of_it(shop: ShopPipeline, tmp_path: Path) -> None:
    routed = with_rule(shop, {"path": f"{shop.folder}/elsewhere"})
    assert replay(routed.definition, ReplayOptions(sink="lake", into=str(tmp_path / "new"))).ok

    assert (tmp_path / "new/shop/orders/_delta_log").is_dir()
    assert not (tmp_path / "elsewhere").exists()


def test_an_empty_text_in_a_column_that_parts_files_parks_its_key(shop: ShopPipeline) -> None:
    parted = with_rule(shop, PARTED)
    parted.drive("lake")
    parted.append(END + 50, [change(END + 50, 0, 60, "")])
    parted.drive("lake", END + 50)
    (table,) = (table for table in parted.lake_of().tables() if table.topic == "shop.orders")

    assert (table.state, table.parked) == (TargetState.STREAMING, (("60",),))
