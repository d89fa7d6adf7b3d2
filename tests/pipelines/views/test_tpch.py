"""Views in the shape of queries of TPC-H: under random changes each equals DuckDB's answer over the source's rows."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from cdc.view_sql.view_query import queries_of
from tests.pipelines.views import tpch
from tests.pipelines.views.duckdb_rows import comparable, rows_by_duckdb, typed
from tests.pipelines.views.view_pipeline import ViewPipeline

pytestmark = [pytest.mark.usefixtures("with_delta"), pytest.mark.slow]


def assert_equal(pipeline: ViewPipeline) -> None:
    for number, view in tpch.VIEWS.items():
        schema, rows = pipeline.views.schemas()[view["name"]], pipeline.rows(view["name"])
        assert typed(schema, rows) == comparable(rows_by_duckdb(pipeline, view["sql"])), number


@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("seed", range(3))
def test_views_of_tpch_equal_the_answers_of_duckdb(tmp_path: Path, spark: SparkSession, seed: int) -> None:
    random = Random(seed)
    pipeline = ViewPipeline(tmp_path / "tpch", spark.newSession(), tpch.TABLES, list(tpch.VIEWS.values()))
    try:
        assert all(query.only_refresh is None for query in queries_of(pipeline.definition.views).values())
        pipeline.write(*tpch.filled(random))
        pipeline.compute()
        assert_equal(pipeline)
        assert all(pipeline.rows(view["name"]) for view in tpch.VIEWS.values())
        for _ in range(6):
            for _ in range(random.choice((1, 3, 10))):
                pipeline.write(tpch.changed(random, pipeline))
            before = {view["name"]: pipeline.rows(view["name"]) for view in tpch.VIEWS.values()}
            pipeline.compute()
            assert_equal(pipeline)
            for name, rows in before.items():
                assert bool(pipeline.changes(name)) == (rows != pipeline.rows(name))
    finally:
        pipeline.close()
