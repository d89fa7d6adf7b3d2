"""Large ranges on a cluster of two workers, from bucket to bucket: executors and drivers are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pytest

from cdc.log.bucket_files import BucketPath
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.stores.lake_reader import Lake, read_target
from pipelines.runtime.spark_session import SparkSettings, delta_jars
from tests.benchmarks.apply_input import Changes, new_log
from tests.fixtures.catalog import put_catalog
from tests.fixtures.cluster import HOST, Cluster
from tests.fixtures.forked import Forked, start
from tests.fixtures.s3 import KEY, KEY_ID, S3
from tests.fixtures.waiting import until

pytestmark = pytest.mark.timeout(600)  # several JVMs one after the other, beside other tests

KEYS: Final = 4_000
RANGE: Final = 12_000
"""Changes of one range."""
KILLED: Final = -signal.SIGKILL
CONF: Final = {
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.log.level": "INFO",  # what executors did is read from their logs
    "spark.locality.wait": "0s",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.adaptive.enabled": "false",
}
"""Each executor is there before the first task, and gets some of the four that a stage has."""


@dataclass
class ClusterJob:
    """A pipeline without a source: its log grows by ranges, which drivers on the cluster apply."""

    folder: Path
    cluster: Cluster
    s3: S3
    changes: Changes
    log: BucketPath = field(init=False)
    lake: BucketPath = field(init=False)
    appended: int = 0
    drivers: list[Forked] = field(default_factory=list)

    def __post_init__(self) -> None:
        put_catalog(self.folder)
        self.log, self.lake = self.s3.root(), self.s3.root()
        self._writer: LogWriter = new_log(self.log)

    def append_range(self) -> None:
        """Append the next range to the log, in one commit."""
        self.changes.append(self._writer, self.appended, RANGE)
        self.appended += RANGE

    def drive(self, trigger: str = "once", failpoint: str = "") -> Forked:
        """Start a driver of the definition, which this method writes."""
        key = self.folder / "key"
        key.write_text(KEY)
        key.chmod(0o600)
        storage = f"endpoint: 'http://127.0.0.1:{self.s3.port}', allow_http: true, region: us-east-1"
        keys = f"access_key_id: {KEY_ID}, secret_access_key: {{file: key}}"
        jars = ", ".join(str(jar) for jar in delta_jars(SparkSettings()))
        conf = ", ".join(f"{name}: '{text}'" for name, text in CONF.items())
        definition = self.folder / "cluster.yaml"
        definition.write_text(
            f"name: cluster\nsource: {{dsn: 'postgresql://nobody@127.0.0.1/none'}}\ntables: [{{match: 'shop.*'}}]\n"
            f"log: {{path: '{self.log}/log', storage: {{{storage}, {keys}}}}}\n"
            f"sinks: [{{name: lake, type: delta, path: '{self.lake}/{{schema}}/{{table}}'}}]\n"
            f"spark: {{master: '{self.cluster.master}', engine: spark, delta_jars: [{jars}], conf: {{{conf}}}, "
            f"checkpoint: '{self.folder}/checkpoint'}}\n"
            f"catalog: {{url: 'sqlite:///{self.folder}/catalog.db'}}\n"
        )
        environment = {"CDC_FAILPOINT": failpoint, "SPARK_LOCAL_IP": HOST}
        with (self.folder / "driver.out").open("ab") as output:
            command = ("pipelines", "apply", "-c", definition, "--trigger", trigger)
            self.drivers.append(start(*command, output=output, environment=environment))
        return self.drivers[-1]

    def output(self) -> str:
        """Return what drivers, executors and masters printed last."""
        return (self.folder / "driver.out").read_text(errors="replace")[-6000:] + self.cluster.output()

    def has_published(self) -> bool:
        """Return whether the lake has a published cut at the end of the log."""
        record = Lake.open(f"{self.lake}/{{schema}}/{{table}}").published()
        return record is not None and record.position == Position(self.changes.position(self.appended - 1))

    def assert_equal(self) -> None:
        """Wait for the end of the log; then every row is there once, as its last changes left it."""
        until(self.has_published, lambda: f"the end of the log\n{self.output()}", seconds=240)
        expected = self.changes.rows(self.appended)
        rows = pa.table(read_target(f"{self.lake}/shop/items")).select(expected.column_names)
        assert rows.cast(expected.schema).sort_by("id").equals(expected)


@pytest.fixture(name="two_workers", scope="module")
def _two_workers(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Iterator[Cluster]:
    """Give a cluster whose processes reach the buckets."""
    if not delta_jars(SparkSettings()):
        pytest.skip("no Delta jars on this machine")
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), s3.variables())
    yield cluster
    cluster.end()


@pytest.fixture(name="job")
def _job(tmp_path: Path, two_workers: Cluster, s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterJob]:
    """Give a job with a first range in its log; no driver of it stays."""
    for name, text in s3.variables().items():
        monkeypatch.setenv(name, text)
    changes = Changes.random(np.random.default_rng(5), KEYS, 3 * RANGE - KEYS, partial=0.1)
    job = ClusterJob(tmp_path, two_workers, s3, changes)
    job.append_range()
    yield job
    for driver in job.drivers:
        driver.kill()
        driver.wait()


def test_drivers_and_an_executor_that_are_killed_leave_the_target_exact(job: ClusterJob) -> None:
    for failpoint in ("after_fold", "before_publish"):
        assert job.drive(failpoint=failpoint).wait(240) == KILLED, f"{failpoint}\n{job.output()}"
    job.drive("100ms")
    job.assert_equal()
    assert all(job.cluster.finished_tasks_by_worker().values()), job.output()

    again = job.cluster.tasks_started_again()
    job.append_range()
    os.kill(job.cluster.working(), signal.SIGKILL)
    until(lambda: job.cluster.tasks_started_again() > again, lambda: f"a task started again\n{job.output()}")
    job.assert_equal()
