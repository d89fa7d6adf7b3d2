"""Affected rows: the rows that the driver reads give the same result as the whole tables in Spark."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc.view_sql.view_query import ViewQuery
from pipelines.views.affected_rows import AffectedRows, ChangedInputs
from pipelines.views.input_changes import changed_keys, usable_inputs
from pipelines.views.view_inputs import ViewInputs
from tests.pipelines.views.shop_tables import TABLES
from tests.pipelines.views.test_view_engine import TOTALS, change, filled, opened
from tests.pipelines.views.view_pipeline import ViewPipeline

pytestmark = [pytest.mark.usefixtures("with_delta"), pytest.mark.slow]


def inputs_of(shop: ViewPipeline) -> ViewInputs:
    return shop.engine._idle[0].inputs


def pairs(shop: ViewPipeline, changed: ChangedInputs, *, few: bool) -> list[set[str]]:
    query = ViewQuery.parse(TOTALS["name"], TOTALS["sql"], TOTALS["key"])
    rows = AffectedRows(query, inputs_of(shop), changed)
    assert rows._few is not None
    assert rows._few.needed().affected_keys(query.key) is not None
    if not few:
        rows._few = None
    found: list[set[str]] = [set(), set()]
    assert rows.find_keys(1_000)
    for both in rows.pairs():
        for side, part in zip(found, both, strict=True):
            side.update(map(str, part.to_pylist()))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_both_ways_give_the_same_rows(tmp_path: Path, spark: SparkSession, seed: int) -> None:
    chance = random.Random(seed)
    with opened(tmp_path / "shop", spark, TOTALS) as shop:
        filled(shop)
        before = usable_inputs(shop.publish(), TABLES)
        position = shop._loop.position
        while shop._position < 1_070:
            changes = [change(chance, shop) for _ in range(2)]
            if all(operation != "t" for _, operation, _ in changes):
                shop.write(*changes)
        after = usable_inputs(shop.publish(), TABLES)
        shop.engine._change_log.refresh()
        relations = {schema.relation: schema for schema in TABLES.values()}
        keys = changed_keys(shop.engine._change_log, position, shop._loop.position, relations)
        typed = {
            relations[relation].topic: inputs_of(shop).typed_keys(found, relations[relation])
            for relation, found in keys.items()
            if isinstance(found, pa.Array)
        }
        changed = ChangedInputs(before, after, typed)

        assert pairs(shop, changed, few=True) == pairs(shop, changed, few=False)
