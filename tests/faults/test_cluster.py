"""Apply, replay and compaction on a Spark cluster of its own processes: by spark-submit, with executors that die.

Every sink ends equal to its source: what executors do is read and fold, and write files that nobody sees before the
driver's commit; what is lost with one is done again.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, QueryBuilder

from cdc.catalog import Catalog
from cdc.demo.shop_workload import Workload
from cdc.errors import LogFenced
from cdc.log.compacted_table import read_compacted_state
from cdc.log.disk_format import LogFile
from cdc.log.reader import LogReader, read_file
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.service.background_jobs import ReplayJobs
from cdc.targets.lake_reader import Lake
from pipelines.compaction.compaction_steps import compact
from pipelines.engine_decision import PARTIAL_ROWS
from pipelines.folding.fold import fold
from pipelines.runtime.spark_session import SparkSettings, delta_jars
from tests.faults.test_kill_apply import assert_equal
from tests.faults.test_kill_reader import prepare
from tests.faults.test_kill_reader_bucket import lies_in_a_bucket
from tests.fixtures.cluster import HOST, WORKERS, Cluster
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.s3 import KEY, KEY_ID, S3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(270)]

MANY = 20_000
"""Rows that one transaction adds."""
LARGE = 1_000
"""Those among them with a large value, which updates do not send."""
UPDATES = PARTIAL_ROWS // LARGE + 1
"""How often that transaction updates these rows: more often than the driver folds by itself."""
SLOW = 240.0
"""Seconds for a cluster of several JVMs on a busy machine."""


SPECULATION = (
    "spark.speculation=true",
    "spark.speculation.interval=100ms",
    "spark.speculation.task.duration.threshold=1s",
)
"""A task that takes a second is tried on another executor as well, also where it is the only one of its stage."""


class Submitted:
    """A driver that was submitted: cdc, spark-submit's JVM, and the Python that it starts."""

    def __init__(self, pipeline: Pipeline, cluster: Cluster, options: Sequence[str]) -> None:
        environment = {**os.environ, "CDC_TEST_DSN": pipeline.dsn, "SPARK_LOCAL_IP": HOST}
        command = [sys.executable, "-m", "cdc", "spark", "submit", "-c", str(pipeline.definition)]
        with (pipeline.folder / "submitted.out").open("ab") as output:
            self._process = subprocess.Popen(
                [*command, "--master", cluster.master, *options],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self, timeout: float = SLOW) -> int:
        """Its exit status."""
        return self._process.wait(timeout)

    def pids(self, of: str) -> list[int]:
        """Those of its processes that run such a program."""
        found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in found if _group(pid) == self._process.pid and of in _program(pid)]

    def kill(self) -> None:
        """Leave nothing of it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return ""


def written(pipeline: Pipeline, *more: str, lake: str = "") -> None:
    """The definition for a cluster of this machine; more: settings of Spark, NAME=VALUE."""
    lake = lake or f"{pipeline.folder}/lake"
    pipeline.write(sinks=f"[{{name: lake, type: delta, path: '{lake}/{{schema}}/{{table}}'}}]")
    jars = ", ".join(str(jar) for jar in delta_jars(SparkSettings()))
    # INFO: what executors do is read from what they say
    settings = ("spark.executor.memory=512m", "spark.driver.memory=512m", "spark.log.level=INFO", *more)
    conf = ", ".join("{}: '{}'".format(*setting.split("=")) for setting in settings)
    spark = f"spark: {{delta_jars: [{jars}], conf: {{{conf}}}, "
    pipeline.definition.write_text(pipeline.definition.read_text().replace("spark: {", spark))


def tried_again(cluster: Cluster, known: int) -> bool:
    """Whether more tasks than that were begun once more."""
    return cluster.tasks_started_again() > known


def reached(s3: S3) -> dict[str, str]:
    """The variables by which whoever has them gets at the buckets."""
    variables = {"AWS_ENDPOINT_URL": f"http://{HOST}:{s3.port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    return {**variables, "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": KEY}


def add_many(pipeline: Pipeline, first: int = 1) -> None:
    """A transaction that no driver folds alone, in the log."""
    with connect(pipeline.dsn) as conn:
        rows = "SELECT n, 'note ' || n FROM generate_series(%s::int, %s::int) n"
        with conn.transaction():
            conn.execute(f"INSERT INTO shop.many {rows}", [first, first + MANY - 1])
            some = f"id BETWEEN {first} AND {first + LARGE - 1}"
            conn.execute(f"UPDATE shop.many SET large = repeat('large ', 800) WHERE {some}".encode())
            again = f"UPDATE shop.many SET note = note WHERE {some}"
            conn.execute(f"DO $$ BEGIN FOR i IN 1..{UPDATES} LOOP {again}; END LOOP; END $$".encode())
    pipeline.settle()


def change_many(pipeline: Pipeline) -> None:
    """Rows that are changed and rows that go, in the log."""
    with connect(pipeline.dsn) as conn:
        conn.execute("UPDATE shop.many SET note = note || '!' WHERE id % 3 = 0")
        conn.execute("DELETE FROM shop.many WHERE id % 7 = 0")
    pipeline.settle()


def rows_in_order(target: str, version: int | None = None) -> list[dict[str, Any]]:
    """Every row of a Delta table; no two of them come from one change."""
    table = DeltaTable(target, version=version)
    query = QueryBuilder().register("target", table).execute("SELECT * FROM target ORDER BY _position, _ordinal")
    return pa.table(query).to_pylist()


def latest_rows(files: Sequence[LogFile], upto: Position) -> pa.Table:
    """What files of the log say of every key."""
    rows = fold(pa.concat_tables([read_file(file, Position(0), upto) for file in files]), sink="lake")
    rows = rows.filter(pc.is_in(rows["op"], pa.array(["c", "u", "r"])))
    return rows.sort_by([("position", "ascending"), ("ordinal", "ascending")])


@pytest.fixture(name="shop")
def _shop(pipeline: Pipeline) -> Pipeline:
    prepare(pipeline)
    with connect(pipeline.dsn) as conn:
        conn.execute("CREATE TABLE shop.many (id int PRIMARY KEY, note text, large text)")
        conn.execute("ALTER TABLE shop.many ALTER large SET STORAGE EXTERNAL")
    return pipeline


@pytest.fixture(name="submit")
def _submit(shop: Pipeline, cluster: Cluster) -> Iterator[Callable[..., Submitted]]:
    """Submits drivers, and leaves none."""
    drivers: list[Submitted] = []

    def submit(*options: str) -> Submitted:
        drivers.append(Submitted(shop, cluster, options))
        return drivers[-1]

    yield submit
    for driver in drivers:
        driver.kill()


def test_a_run_that_ends_has_executors_apply_what_was_durable_from_bucket_to_bucket(
    shop: Pipeline, cluster: Cluster, submit: Callable[..., Submitted], s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies_in_a_bucket(shop, s3)
    lake = str(s3.root())
    written(shop, lake=lake)
    shop.reader()
    shop.wait_for_copy()
    add_many(shop)
    durable = shop.durable()
    for name, value in reached(s3).items():
        monkeypatch.setenv(name, value)
    assert submit("--trigger", "once").wait() == 0, shop.output() + cluster.output()

    record = Lake.open(f"{lake}/{{schema}}/{{table}}").published()
    assert record is not None
    assert record.position >= durable
    found = pa.table(
        QueryBuilder()
        .register("many", DeltaTable(f"{lake}/shop/many"))
        .execute("SELECT id, note FROM many ORDER BY id")
    )
    assert found.to_pylist() == [{"id": n, "note": f"note {n}"} for n in range(1, MANY + 1)]
    assert cluster.tasks("Finished task")
    assert cluster.tasks("Fetching .*cdc-code.zip")
    assert KEY not in shop.output() + cluster.output()


def test_executors_that_hang_and_that_die_leave_the_lake_exact(
    shop: Pipeline, cluster: Cluster, submit: Callable[..., Submitted]
) -> None:
    written(shop, *SPECULATION)
    shop.reader()
    shop.wait_for_copy()
    submit("--trigger", "100ms")
    shop.wait(lambda: len(cluster.executors()) == WORKERS, "executors", seconds=SLOW)
    for first, stop in ((1, signal.SIGSTOP), (1 + MANY, signal.SIGKILL)):
        before = cluster.tasks_started_again()
        add_many(shop, first)
        victim = cluster.working()
        os.kill(victim, stop)
        shop.wait(partial(tried_again, cluster, before), "a task tried again")
        assert_equal(shop)
        if stop is signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
    assert_equal(shop)


def test_drivers_that_die_leave_the_lake_exact_and_the_second_of_two_waits(
    shop: Pipeline, submit: Callable[..., Submitted]
) -> None:
    written(shop)
    workload = Workload(shop.dsn, rate=30.0, seed=5)
    shop.reader()
    shop.wait_for_copy()
    workload.start()
    try:
        first = submit("--trigger", "100ms")
        shop.wait((shop.folder / "lake/shop/customers/_delta_log").exists, "the lake", seconds=SLOW)
        second = submit("--trigger", "100ms")
        shop.wait(lambda: "has the lease of the sink" in shop.output(), "the second waits", seconds=SLOW)
        assert_equal(shop)
        for pid in first.pids("java"):
            os.kill(pid, signal.SIGKILL)
        assert first.wait() != 0
        shop.wait(lambda: not first.pids("python"), "no Python stays behind a JVM that is gone")
        shop.wait_for_more(workload, 30)
    finally:
        workload.stop()
    assert_equal(shop)
    assert second.pids("java")


def test_executors_build_a_target_anew_that_holds_the_rows_of_the_old_one(
    shop: Pipeline, cluster: Cluster, submit: Callable[..., Submitted]
) -> None:
    written(shop)
    shop.reader()
    shop.wait_for_copy()
    for first in (1, 1 + MANY):
        add_many(shop, first)
    change_many(shop)
    assert submit("--trigger", "once").wait() == 0, shop.output() + cluster.output()
    before, new = cluster.tasks("Finished task"), shop.folder / "new"
    job = submit("replay", "lake", "--from", "beginning", "--into", str(new))
    with Catalog.open(f"sqlite:///{shop.folder}/catalog.db") as catalog:
        replays = ReplayJobs(catalog, shop.name, None)
        shop.wait(lambda: (told := replays.last("lake")) and told.state == "running", "the catalog tells", seconds=SLOW)
        assert job.wait() == 0, shop.output() + cluster.output()
        told = replays.last("lake")
    assert told is not None
    assert (told.state, told.request.into) == ("done", str(new))
    assert cluster.tasks("Finished task") > before

    tables = Lake.open(f"{shop.folder}/lake/{{schema}}/{{table}}").tables()
    assert "shop.many" in {table.topic for table in tables}
    for table in tables:
        built = rows_in_order(f"{new}/{table.topic.replace('.', '/')}")
        assert built == rows_in_order(table.target, table.version), table.topic


def test_a_replay_that_the_log_rules_out_ends_as_wrong_use(shop: Pipeline, submit: Callable[..., Submitted]) -> None:
    written(shop)
    shop.reader()
    shop.wait_for_copy()

    assert submit("replay", "lake", "--from", "7F/0").wait() == 2
    assert "--from 7F/0 is after the end of the log" in shop.output()


def test_executors_compact_the_log_and_a_driver_that_is_late_is_refused(
    shop: Pipeline, cluster: Cluster, submit: Callable[..., Submitted]
) -> None:
    written(shop)
    shop.reader()
    shop.wait_for_copy()
    for first, is_late in ((1, False), (1 + MANY, True)):
        add_many(shop, first)
        change_many(shop)
        before, durable, log = cluster.tasks("Finished task"), shop.durable(), LogReader(shop.log)
        right = latest_rows(log.files(Position(0), durable), durable)
        job = submit("compact", "--all")
        if is_late:
            os.kill(victim := cluster.working(), signal.SIGSTOP)
            compact(None, shop.log, everything=True)
            os.kill(victim, signal.SIGCONT)
        assert job.wait() == int(is_late), shop.output() + cluster.output()
        assert (f"{LogFenced.code} " in shop.output()) is is_late
        assert cluster.tasks("Finished task") > before

        held = read_compacted_state(shop.log)
        assert held is not None
        assert held.horizon >= durable
        assert latest_rows(held.files, held.horizon).equals(right)


def test_executors_read_a_first_copy_into_a_log_in_a_bucket(
    shop: Pipeline, cluster: Cluster, submit: Callable[..., Submitted], s3: S3
) -> None:
    with connect(shop.dsn) as conn:
        conn.execute("INSERT INTO shop.many SELECT n, 'note ' || n, repeat('x', 100) FROM generate_series(1, 200000) n")
    lies_in_a_bucket(shop, s3)
    written(shop)
    shop.definition.write_text(shop.definition.read_text() + "snapshot: {beside: 64KiB}\n")
    job = submit("copy")
    shop.wait(lambda: "tasks of executors read chunks" in shop.output(), "the offer of the executors", seconds=SLOW)
    shop.reader()
    shop.wait_for_copy()
    assert job.wait() == 0, shop.output() + cluster.output()

    (read,) = re.findall(r"executors read ([0-9,]+) rows in [0-9,]+ chunks", shop.output())
    assert int(read.replace(",", "")) > 100_000
    assert all(cluster.finished_tasks_by_worker().values())
    log, durable = LogReader(shop.log), shop.durable()
    (relation,) = (number for number, schema in log.schemas().items() if schema.topic == "shop.many")
    rows = latest_rows(log.files(Position(0), durable), durable)
    keys = rows.filter(pc.equal(rows["relation"], relation))["key"].to_pylist()
    assert sorted(int(key) for (key,) in keys) == list(range(1, 200_001))
    assert KEY not in shop.output() + cluster.output()
