"""A whole pipeline whose log lies in a bucket: what the lake holds in the end is what the source holds."""

from __future__ import annotations

import pytest

from cdc.demo.shop_workload import Workload
from tests.faults.test_kill_reader import prepare
from tests.faults.test_kill_reader_bucket import lies_in_a_bucket
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.s3 import KEY, S3

pytestmark = pytest.mark.slow


def test_reader_and_apply_killed_beside_a_bucket_end_in_the_right_lake(pipeline: Pipeline, s3: S3) -> None:
    lies_in_a_bucket(pipeline, s3)
    prepare(pipeline)
    pipeline.write(sinks=f"[{{name: lake, type: delta, path: '{pipeline.folder}/lake/{{schema}}/{{table}}'}}]")
    workload = Workload(pipeline.dsn, rate=20.0, seed=3)
    reader, apply = pipeline.reader(), pipeline.apply()
    pipeline.wait_for_copy()
    workload.start()
    try:
        pipeline.wait((pipeline.folder / "lake/shop/customers/_delta_log").exists, "the lake")
        for child in (reader, apply):
            child.kill()
            child.wait()
        pipeline.reader()
        pipeline.apply()
        pipeline.wait_for_more(workload, 30)
    finally:
        workload.stop()
    pipeline.settle()

    assert pipeline.verify()["ok"], pipeline.output()
    assert KEY not in pipeline.output()
