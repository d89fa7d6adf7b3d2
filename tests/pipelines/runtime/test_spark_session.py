"""The Spark session: its settings, and where the Delta jars come from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import SparkConf
from pyspark.sql import SparkSession

import pipelines
from cdc.cluster.spark_submit_command import DELTA_PACKAGE
from cdc.errors import SparkUnavailable
from pipelines.runtime.spark_session import (
    COMPACTION_POOL,
    IVY_CACHES,
    NEEDED_JARS,
    SparkSettings,
    _jvm_conf,
    _sql_settings,
    check_prerequisites,
    delta_jars,
    has_delta,
    start_jvm_early,
    starts_on_demand,
)
from tests.fixtures import java

PATIENCE = 240  # seconds for a JVM on a busy machine

PROGRAM = """
import sys
from pipelines.runtime.spark_session import SparkSettings, spark_session
session = spark_session(SparkSettings(master="local[1]", delta_jars=tuple(sys.argv[1:]), download=False))
print(session.delta, session.range(3).rdd.map(lambda n: n.id).sum())
session.stop()
"""
EARLY = """
import sys
from pyspark import SparkContext
from pipelines.runtime.spark_session import SparkSettings, start_jvm_early
thread = start_jvm_early(
    SparkSettings(master="spark://127.0.0.1:1", app_name="cdc-early", delta_jars=tuple(sys.argv[1:]))
)
thread.join()
jvm = SparkContext._jvm
print(jvm is not None, jvm.java.lang.System.getProperty("spark.app.name"))
"""


def cache(home: Path, names: tuple[str, ...] = NEEDED_JARS, place: str = IVY_CACHES[0]) -> list[Path]:
    directory = home / place
    directory.mkdir(parents=True)
    jars = [directory / f"io.delta_{name}" for name in names]
    for jar in jars:
        jar.touch()
    return jars


@pytest.mark.parametrize("place", IVY_CACHES)
def test_jars_in_an_ivy_cache_are_found_without_a_network(tmp_path: Path, place: str) -> None:
    jars = cache(tmp_path, place=place)

    assert list(delta_jars(SparkSettings(), tmp_path)) == jars


def test_a_cache_that_lacks_a_jar_is_no_cache(tmp_path: Path) -> None:
    cache(tmp_path, NEEDED_JARS[:1])

    assert delta_jars(SparkSettings(), tmp_path) == ()


def test_given_jars_come_before_the_cache_and_may_be_a_directory(tmp_path: Path) -> None:
    cache(tmp_path)
    given = tmp_path / "given"
    given.mkdir()
    (given / "delta.jar").touch()
    (given / "notes.txt").touch()

    assert delta_jars(SparkSettings(delta_jars=(str(given),)), tmp_path) == (given / "delta.jar",)


def test_a_given_jar_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Delta jar .* does not exist"):
        delta_jars(SparkSettings(delta_jars=(str(tmp_path / "none.jar"),)))


@pytest.mark.parametrize(
    ("umask", "enabled"), [("", "true"), ("0027", "true"), ("0007", None), ("0075", None), ("0000", None)]
)
def test_sockets_are_files_unless_others_may_write_files(
    umask: str, enabled: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CDC_UMASK", umask)

    settings = _sql_settings(SparkSettings(), delta=False)

    assert settings.get("spark.python.unix.domain.socket.enabled") == enabled


def test_a_session_reads_postgres_text_under_utc_and_ansi(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"


@pytest.mark.slow
def test_a_session_says_whether_it_has_delta(spark: SparkSession, tmp_path: Path) -> None:
    assert spark.delta == has_delta(spark.range(1).sparkSession)
    if not spark.delta:
        pytest.skip("no Delta jars on this machine")
    path = str(tmp_path / "a table")
    spark.range(4).write.format("delta").save(path)
    spark.sql(
        f"MERGE INTO delta.`{path}` t USING (SELECT * FROM range(3, 6)) s ON t.id = s.id "
        "WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT *"
    )

    assert sorted(row["id"] for row in spark.read.format("delta").load(path).collect()) == [0, 1, 2, 4, 5]


@pytest.mark.slow
def test_a_session_starts_from_a_path_with_a_space_under_somebody_elses_spark_home(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "pipelines").symlink_to(Path(pipelines.__file__).parent)
    (folder / "cdc").symlink_to(Path(pipelines.__file__).parents[1] / "cdc")
    (folder / "jars").mkdir()
    for jar in delta_jars(SparkSettings()):
        (folder / "jars" / jar.name).symlink_to(jar)
    (folder / "program.py").write_text(PROGRAM)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "SPARK_HOME": "/nowhere", "PYTHONPATH": str(folder)}
    environment[java.VARIABLE] = os.environ[java.VARIABLE]

    done = subprocess.run(
        [sys.executable, str(folder / "program.py"), str(folder / "jars")],
        env=environment,
        cwd=folder,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout.split() == [str(bool(delta_jars(SparkSettings()))).encode(), b"3"], done.stderr


def test_the_jvm_of_a_cluster_starts_before_anything_asks_for_a_session(tmp_path: Path) -> None:
    (tmp_path / "delta.jar").touch()

    done = subprocess.run(
        [sys.executable, "-c", EARLY, str(tmp_path / "delta.jar")], capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.stdout.split() == [b"True", b"cdc-early"], done.stderr


@pytest.mark.parametrize("master", ["local[2]", "local"])
def test_no_jvm_starts_early_where_spark_may_never_be_needed(master: str) -> None:
    assert start_jvm_early(SparkSettings(master=master)) is None


def test_an_error_of_an_early_jvm_is_left_to_the_session(tmp_path: Path) -> None:
    settings = SparkSettings(master="yarn", delta_jars=(str(tmp_path / "none.jar"),))
    thread = start_jvm_early(settings)
    assert thread is not None
    thread.join(PATIENCE)

    assert not thread.is_alive()
    with pytest.raises(SparkUnavailable, match=r"spark\.delta_jars is wrong"):
        check_prerequisites(settings)


def test_spark_waits_for_its_first_use_only_where_nothing_can_be_found_wrong_later(tmp_path: Path) -> None:
    (tmp_path / "delta.jar").touch()
    jars = (str(tmp_path / "delta.jar"),)

    assert starts_on_demand(SparkSettings(delta_jars=jars))
    assert not starts_on_demand(SparkSettings(conf={"spark.jars.packages": DELTA_PACKAGE}, delta_jars=jars))
    assert not starts_on_demand(SparkSettings(master="yarn", delta_jars=jars))


def test_what_spark_needs_is_checked_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_prerequisites(SparkSettings())
    with pytest.raises(SparkUnavailable, match=r"spark\.delta_jars is wrong"):
        check_prerequisites(SparkSettings(delta_jars=(str(tmp_path / "none.jar"),)))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkUnavailable, match="has no 'bin/java'"):
        check_prerequisites(SparkSettings())


@pytest.mark.parametrize(
    ("master", "local"), [("local", True), ("local[*]", True), ("local-cluster[2,1,1024]", False), ("yarn", False)]
)
def test_one_machine_is_what_spark_runs_in_one_process(master: str, local: bool) -> None:
    assert SparkSettings(master=master).local is local


def test_what_was_submitted_wins_but_where_results_depend_on_it(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = dict(SparkConf().getAll())
    assert submitted["spark.ui.enabled"] == "false"
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    asked = {"spark.ui.enabled": "true", "spark.master": "yarn", "spark.mine": "1"}
    chosen = _sql_settings(SparkSettings(conf=asked), delta=False)

    assert "spark.master" in submitted
    assert not {"spark.ui.enabled", "spark.master"} & chosen.keys()
    assert chosen["spark.mine"] == "1"
    assert chosen["spark.sql.session.timeZone"] == "UTC"


def test_a_compaction_gets_what_the_sinks_leave(spark: SparkSession) -> None:
    context = spark.sparkContext._jsc.sc()
    least = {name: context.getPoolForName(name).get().minShare() for name in ("default", COMPACTION_POOL)}

    assert least["default"] > 1_000
    assert least[COMPACTION_POOL] == 0


def test_only_a_jvm_without_rows_does_without_its_second_compiler() -> None:
    for settings, is_without in (
        (SparkSettings(), False),
        (SparkSettings(has_rows=False), True),
        (SparkSettings(master="spark://host:7077"), True),
    ):
        options = _jvm_conf(settings, ()).get("spark.driver.extraJavaOptions") or ""
        assert ("-XX:TieredStopAtLevel=1" in options) == is_without
