"""Executors of two machines read a log in a bucket and write a lake in a bucket; processes of all kinds are killed.

The workers have networks and directories of their own, without the code of cdc. Every driver begins in a directory of
its own, as on another machine: it has neither checkpoints nor key indexes of the one before. They share the buckets,
and the drivers also the catalog in Postgres.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from cdc.bucket_files import BucketPath
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.targets.lake_reader import Lake, read_target
from pipelines.runtime.spark_session import SparkSettings, delta_jars
from tests.benchmarks.apply_input import Changes, new_log
from tests.fixtures.cluster import BucketCluster, Cluster, kill_executor, kill_python_workers
from tests.fixtures.forked import Forked, start
from tests.fixtures.machines import PACKAGES, REFUSED
from tests.fixtures.s3 import KEY, KEY_ID
from tests.fixtures.waiting import until

pytestmark = pytest.mark.timeout(600)  # several JVMs one after the other, beside other tests

KEYS: Final = 60_000
"""Keys of the table: a batch that changes so many of them is written by executors."""
RANGES: Final = (KEYS,) * 6
"""Changes of each range that may be needed; the first inserts every key."""
KILLED: Final = -signal.SIGKILL
CONF: Final = {
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.log.level": "INFO",  # what executors did is read from their logs
    "spark.locality.wait": "0s",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "240s",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.adaptive.enabled": "false",
}
"""Each executor is there before the first task, and gets some of the four that a stage has."""


@dataclass
class ClusterJob:
    """A pipeline without a source: its log grows by ranges, which drivers on the cluster apply."""

    folder: Path
    buckets: BucketCluster
    catalog: str
    """URL of the catalog."""
    changes: Changes
    log: BucketPath = field(init=False)
    lake: str = field(init=False)
    """Path of the sink."""
    ranges: Iterator[int] = field(default_factory=lambda: iter(RANGES))
    """Changes of each range that is not in the log yet."""
    appended: int = 0
    drivers: list[Forked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log, self.lake = self.buckets.s3.root(), f"{self.buckets.s3.root()}/{{schema}}/{{table}}"
        self._writer: LogWriter = new_log(self.log)

    @property
    def cluster(self) -> Cluster:
        return self.buckets.cluster

    @property
    def target(self) -> str:
        return self.lake.format(schema="shop", table="items")

    def append_range(self) -> None:
        """Append the next range to the log, in one commit."""
        count = next(self.ranges)
        self.changes.append(self._writer, self.appended, count)
        self.appended += count

    def drive(self, failpoint: str) -> Forked:
        """Start a driver that a failpoint kills."""
        return self._start("pipelines", "apply", "--trigger", "once", failpoint=failpoint)

    def submit(self) -> Forked:
        """Start a driver by spark-submit, which applies whatever the log gets."""
        return self._start("cdc", "spark", "submit", "--trigger", "100ms", "--master", self.cluster.master)

    def _start(self, *command: str, failpoint: str = "") -> Forked:
        machine = self.folder / f"machine-{len(self.drivers)}"
        machine.mkdir()
        key = machine / "key"
        key.write_text(KEY)
        key.chmod(0o600)
        storage = f"endpoint: '{self.buckets.endpoint}', allow_http: true, region: us-east-1"
        keys = f"access_key_id: {KEY_ID}, secret_access_key: {{file: key}}"
        jars = ", ".join(str(jar) for jar in delta_jars(SparkSettings()))
        conf = ", ".join(f"{name}: '{text}'" for name, text in CONF.items())
        definition = machine / "cluster.yaml"
        definition.write_text(
            f"name: cluster\nsource: {{dsn: 'postgresql://nobody@127.0.0.1/none'}}\ntables: [{{match: 'shop.*'}}]\n"
            f"log: {{path: '{self.log}/log', storage: {{{storage}, {keys}}}}}\n"
            f"sinks: [{{name: lake, type: delta, path: '{self.lake}'}}]\n"
            f"spark: {{master: '{self.cluster.master}', engine: spark, delta_jars: [{jars}], conf: {{{conf}}}, "
            f"checkpoint: '{machine}/checkpoint'}}\n"
            f"catalog: {{url: '{self.catalog}'}}\n"
        )
        environment = {"CDC_FAILPOINT": failpoint, "SPARK_LOCAL_IP": self.cluster.host}
        with (self.folder / "driver.out").open("ab") as output:
            self.drivers.append(start(*command, "-c", definition, output=output, environment=environment))
        return self.drivers[-1]

    def printed(self) -> str:
        """Return what drivers printed."""
        return (self.folder / "driver.out").read_text(errors="replace")

    def output(self) -> str:
        """Return what drivers, executors and masters printed last."""
        return self.printed()[-6000:] + self.cluster.output()

    def kill_until_tasks_start_again(self, kill: Callable[[int], bool]) -> None:
        """Kill processes of an executor in a batch, until attempts of tasks begin after others have failed."""
        before = self.cluster.tasks_started_again()

        def have_started_again() -> bool:
            if self.cluster.tasks_started_again() > before:
                return True
            if not self.cluster.kill_working(kill) and self.has_published():
                self.append_range()
            return False

        until(have_started_again, lambda: f"a task started again\n{self.output()}", seconds=240)

    def has_published(self) -> bool:
        """Return whether the lake has a published cut at the end of the log."""
        record = Lake.open(self.lake).published()
        return record is not None and record.position == Position(self.changes.position(self.appended - 1))

    def assert_equal(self) -> None:
        """Wait for the end of the log; then every row is there once, as its last changes left it."""
        until(self.has_published, lambda: f"the end of the log\n{self.output()}", seconds=240)
        expected = self.changes.rows(self.appended)
        rows = pa.table(read_target(self.target)).select(expected.column_names)
        assert rows.cast(expected.schema).sort_by("id").equals(expected)


@pytest.fixture(name="job")
def _job(
    tmp_path: Path, bucket_cluster: BucketCluster, database: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ClusterJob]:
    """Give a job with a first range in its log; no driver of it stays."""
    if not delta_jars(SparkSettings()):
        pytest.skip("no Delta jars on this machine")
    for name, text in bucket_cluster.s3.variables().items():
        monkeypatch.setenv(name, text)
    changes = Changes.random(np.random.default_rng(5), KEYS, sum(RANGES) - KEYS, partial=0.1)
    job = ClusterJob(tmp_path, bucket_cluster, database, changes)
    job.append_range()
    yield job
    for driver in job.drivers:
        driver.kill()
        driver.wait()


@pytest.mark.parametrize("failpoint", ["delta_executor_files", pytest.param("before_publish", marks=pytest.mark.slow)])
def test_a_driver_executors_and_python_workers_that_are_killed_leave_the_target_exact(
    job: ClusterJob, failpoint: str
) -> None:
    first = job.drive(failpoint)
    until(lambda: job.cluster.tasks("Finished task"), lambda: f"the first driver works\n{job.output()}")
    job.submit()  # the first one still has the lease
    assert first.wait(240) == KILLED, job.output()
    job.assert_equal()
    files = DeltaTable(job.target).file_uris()
    assert files
    assert all(re.search(r"/part-[0-9a-f-]{36}\.parquet$", file) for file in files), "executors did not write them"
    assert all(job.cluster.finished_tasks_by_worker().values()), job.output()
    assert job.cluster.tasks("Fetching .*cdc-code.zip")
    assert KEY not in job.printed() + job.cluster.output()
    assert "[Stage" not in job.printed(), "a bar of progress in the journal"

    for kill in (kill_python_workers, kill_executor):
        job.kill_until_tasks_start_again(kill)
    job.assert_equal()


def test_the_workers_share_no_directory_and_no_network_and_have_no_code_of_cdc(bucket_cluster: BucketCluster) -> None:
    if bucket_cluster.cluster.machines is None:
        pytest.skip(REFUSED)
    processes = [Path(f"/proc/{pid}") for pid in bucket_cluster.cluster.worker_pids]
    for name in ("net", "mnt"):
        namespaces = [(process / "ns" / name).readlink() for process in (Path("/proc/self"), *processes)]
        assert len({*namespaces}) == len(namespaces)
    folder = bucket_cluster.cluster.folder
    for number, process in enumerate(processes):
        own = [path.name for path in Path(f"{process}/root{folder}").iterdir()]
        assert own == [f"worker-{number}"]
        for package in PACKAGES:
            assert not list(Path(f"{process}/root{Path(package.__file__ or '').parent}").iterdir())
