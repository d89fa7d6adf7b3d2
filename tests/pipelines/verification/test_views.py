"""Verification of views: equal rows, a wrong row in the log, and views that cannot be compared."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc.position import Position
from pipelines.verification.compare_table import TableVerdict
from pipelines.verification.views import compare_views
from pipelines.views.changed_rows import ROWS, differences
from pipelines.views.log_of_views import Cut
from tests.pipelines.views.test_view_engine import RANKS, TOTALS, filled, opened
from tests.pipelines.views.view_pipeline import SOURCE, ViewPipeline

pytestmark = [pytest.mark.usefixtures("with_delta"), pytest.mark.slow]


def compared(shop: ViewPipeline, spark: SparkSession) -> dict[str, TableVerdict]:
    return {verdict.topic: verdict for verdict in compare_views(shop.definition, (), lambda: spark, 5)}


def test_a_view_is_compared_with_its_sql(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, TOTALS, RANKS) as shop:
        assert compared(shop, spark)["shop.v_totals"].state == "absent"
        filled(shop)
        shop.compute()
        found = compared(shop, spark)
        assert [(verdict.equal, verdict.rows) for verdict in found.values()] == [(True, 6), (True, 2)]

        shop.write(("shop.customers", "u", ("2", "Aaron")))
        shop.compute()
        found = compared(shop, spark)
        assert found["shop.v_totals"].equal
        assert (found["shop.v_ranks"].compared, found["shop.v_ranks"].state) == (False, "catching_up")


def test_a_wrong_row_in_the_log_is_found(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, TOTALS) as shop:
        filled(shop)
        shop.compute()
        schema, computed = shop.views.schemas()["shop.v_totals"], shop.views.computed_from
        rows = shop.views.now().rows(schema)
        changed = [
            {**row, "after": [(n, "9" if n == 4 else v) for n, v in row["after"]]} for row in rows.to_pylist()[:1]
        ]
        wrong = differences(rows, pa.Table.from_pylist(changed, ROWS))
        commit = shop.views.begin(Cut(Position(shop.views.position + 10), 0))
        with commit.view(schema.topic):
            commit.add_rows(schema, wrong)
        commit.commit(SOURCE, computed)

        (verdict,) = compared(shop, spark).values()
        assert (verdict.equal, verdict.counts) == (False, {"missing": 5, "differing": 1})
        assert verdict.differing == [{"key": changed[0]["key"], "columns": []}]
