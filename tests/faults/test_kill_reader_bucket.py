"""kill -9 of a reader whose log lies in a bucket: as on a disk, nothing is lost and nothing is there twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc.demo.shop_workload import Workload
from cdc.log.reader import LogReader
from cdc.position import Position
from tests.faults.test_kill_reader import FAILPOINTS, KILLED, killed_in_turn, prepare
from tests.fixtures.pipeline import Pipeline, delete_old_orders
from tests.fixtures.s3 import KEY, KEY_ID, S3


@pytest.fixture(name="shop")
def _shop(pipeline: Pipeline, s3: S3) -> Iterator[tuple[Pipeline, Workload]]:
    lies_in_a_bucket(pipeline, s3)
    prepare(pipeline)
    delete_old_orders(pipeline.dsn)
    workload = Workload(pipeline.dsn, rate=40.0, seed=7)
    yield pipeline, workload
    workload.stop()


def lies_in_a_bucket(pipeline: Pipeline, s3: S3) -> None:
    """Let the log lie there; the key stands in a file beside the definition."""
    key = pipeline.folder / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    pipeline.log = s3.root()
    pipeline.storage = (
        f", storage: {{endpoint: 'http://127.0.0.1:{s3.port}', allow_http: true, region: us-east-1, "
        f"access_key_id: {KEY_ID}, secret_access_key: {{file: key}}}}"
    )


@pytest.mark.parametrize(
    "failpoints",
    [["after_log_commit:2"], pytest.param(["after_copy_staged", *FAILPOINTS], marks=pytest.mark.slow)],
    ids=["one", "every"],
)
def test_a_killed_reader_goes_on_where_the_bucket_ends(shop: tuple[Pipeline, Workload], failpoints: list[str]) -> None:
    pipeline, workload = shop
    if failpoints[0] == "after_copy_staged":
        assert pipeline.reader(failpoints[0]).wait(60) == KILLED
        failpoints = failpoints[1:]
    killed = killed_in_turn(pipeline, workload, failpoints, more=10)
    killed.terminate()

    assert killed.wait(60) == 0, pipeline.output()
    log = LogReader(pipeline.log)
    assert sum(batch.num_rows for batch in log.rows(Position(0), log.durable or Position(0))) > 0
    assert KEY not in pipeline.output()
