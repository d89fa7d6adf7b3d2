"""Creation of the Spark session: its settings, and the Delta jars."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from threading import Thread
from typing import Final, Self

import pyspark
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.sql import SparkSession

from cdc.cluster.spark_submit_command import DELTA_PACKAGE, SHIPPED_BY_SPARK
from cdc.config import Definition
from cdc.errors import SparkUnavailable
from cdc.file_modes import configured_umask
from pipelines.runtime.executor_code import ship

NEEDED_JARS: Final = ("delta-spark_4.2_2.13-4.4.0.jar", "delta-storage-4.4.0.jar")
"""The jars that Spark needs to read and write Delta tables; found by experiment.

The other dependencies of the Delta package are already in PySpark, often in newer versions, or serve Unity Catalog.
"""

IVY_CACHES: Final = (".ivy2.5.2/jars", ".ivy2/jars")
"""Directories below the home directory in which `spark-submit --packages` stores jars, in Spark 4 and in Spark 3."""

_EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
_CATALOG: Final = "org.apache.spark.sql.delta.catalog.DeltaCatalog"

_PLAIN_CHECKPOINTS: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)

COMPACTION_POOL: Final = "compaction"
"""Scheduler pool of compaction jobs; on one machine it gets the capacity that the sinks do not use."""

EVERYWHERE: Final = {
    # values are Postgres text under timezone UTC; a session in local time would shift them at the first cast
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # other readers convert INT96, the default, to 64 bits of nanoseconds, which end in 2262: year 9999 becomes 1816
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # the default, 10 ms between two polls of the source, costs an idle query more CPU
    "spark.sql.streaming.pollingDelay": "20ms",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.python.worker.reuse": "true",
    "spark.ui.enabled": "false",
    # a bar of characters that a terminal overwrites fills the journal of a service
    "spark.ui.showConsoleProgress": "false",
}
"""Spark settings of every session; SparkSettings.conf overrides them."""

UNIX_SOCKETS: Final = {
    "spark.python.unix.domain.socket.enabled": "true",
    # the default, the directory of the JVM for temporary files, has too long a name in a container of YARN
    "spark.python.unix.domain.socket.dir": "/tmp",  # noqa: S108 - the names in it are random
}
"""Spark settings of sessions whose JVMs and Python workers speak over sockets that are files.

Over TCP the first bytes of a task wait 40 ms for the acknowledgement of the ones before. Spark gives a socket that is a
file no password, so only the account of the process may write to it.
"""
_WRITE_OF_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH

DECISIVE: Final = frozenset(
    {
        "spark.sql.session.timeZone",
        "spark.sql.ansi.enabled",
        "spark.sql.execution.arrow.pyspark.enabled",
        "spark.sql.parquet.outputTimestampType",
    }
)
"""Names of the settings in EVERYWHERE that change results; their values also override settings of spark-submit."""

ON_ONE_MACHINE: Final = {
    # 50 snapshot partitions, the default, make each small Delta read take seconds
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.cleaner.periodicGC.interval": "10min",
    # adaptive planning helps large joins, and costs a small batch more than its fold
    "spark.sql.adaptive.enabled": "false",
    # Hadoop sets permissions and checksums of local files by starting a process for each: 100 ms a batch for the
    # two files of a checkpoint that is deleted with its query
    "spark.sql.streaming.checkpointFileManagerClass": _PLAIN_CHECKPOINTS,
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    # FIFO would let every sink wait until the last task of a compaction has begun
    "spark.scheduler.mode": "FAIR",
    # not percent-encoded: Hadoop reads %20 as part of the name
    "spark.scheduler.allocation.file": f"file://{Path(__file__).with_name('pools.xml')}",
}
"""Additional Spark settings for a `local` master, where driver and executors are one process."""

_TRUST_ARROW: Final = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""JVM options that turn off Arrow's checks of each vector access, because Spark checks nulls itself.

This saves a fifth of the time per row.
"""

_PLANS_ONLY: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""JVM options of a driver that plans and commits, but has no rows, as that of a cluster.

The second compiler of the JVM takes half of the CPU of its first minute, and pays only where code runs often.
"""
_HOT_CODE_ONLY: Final = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 "
    "-XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
)
"""JVM options of executors: the second compiler takes code that ran ten times as often as by default.

An executor passes rows between Python workers and disks. The second compiler took a third of the CPU of its JVM while
it applied five million changes. A loop over rows, in a join or in the SQL of a view, still gets there soon.
"""

ON_A_CLUSTER: Final = {
    "spark.driver.extraJavaOptions": f"{_TRUST_ARROW} {_PLANS_ONLY}",
    "spark.executor.extraJavaOptions": f"{_TRUST_ARROW} {_HOT_CODE_ONLY}",
    # tasks of SQL have it; with it, other tasks run in the same Python workers
    "spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK": "1",
}
"""Additional Spark settings for any other master."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSettings:
    """The settings with which this process creates a Spark session."""

    master: str = "local[2]"
    app_name: str = "cdc"
    conf: Mapping[str, str] = field(default_factory=dict)
    """Spark properties from the definition; they override the settings of this module."""
    delta_jars: tuple[str, ...] = ()
    """Jar files of Delta, or directories of them; if given, no cache is searched and nothing is downloaded."""
    warehouse: str | None = None
    """Directory in which Spark stores tables without a path; None: Spark's default below the working directory."""
    download: bool = True
    """Whether a missing Delta jar may be downloaded."""
    has_rows: bool = True
    """Whether rows pass through the JVM of a `local` master; False if its tasks only run functions of Python."""

    @classmethod
    def of(cls, definition: Definition, app_name: str) -> Self:
        """Return the Spark settings of a definition, with the given name of the application."""
        spark = definition.spark
        return cls(master=spark.master, app_name=app_name, conf=dict(spark.conf), delta_jars=tuple(spark.delta_jars))

    @property
    def local(self) -> bool:
        """Whether driver and executors are one process."""
        return is_local(self.master)


def spark_session(settings: SparkSettings) -> SparkSession:
    """Create the session, or return the running one; its attribute `delta` is true if Delta is available.

    Under spark-submit the JVM already runs with its own jars, and submitted settings override `settings`, except for
    DECISIVE. The executors of a cluster get the code of this process.
    Raises SparkUnavailable if Spark does not start, or if a path in delta_jars does not exist. If a Delta jar cannot be
    downloaded, no error is raised: a line on stderr reports it, and the driver alone writes the targets.
    """
    check_prerequisites(settings)
    try:
        return _started(settings)
    except (PySparkException, Py4JError) as exc:
        raise SparkUnavailable(f"Spark does not start: {_error_line(exc)}") from exc


def check_prerequisites(settings: SparkSettings) -> None:
    """Raise SparkUnavailable if a jar of the settings or Java is missing; takes no measurable time."""
    try:
        delta_jars(settings)
    except FileNotFoundError as exc:
        raise SparkUnavailable(
            f"spark.delta_jars is wrong: {exc}", remedy="correct spark.delta_jars, or omit it"
        ) from exc
    home = os.environ.get("JAVA_HOME")
    if _submitted() or which(str(Path(home) / "bin" / "java") if home else "java") is not None:
        return
    raise SparkUnavailable(
        f"Spark needs Java, but JAVA_HOME {home!r} has no 'bin/java'"
        if home
        else "Spark needs Java, but JAVA_HOME is not set and no 'java' is on the PATH",
        remedy="install Java 17 or later, or set JAVA_HOME in the environment of this process",
    )


def start_jvm_early(settings: SparkSettings) -> Thread | None:
    """Begin to start the JVM of a cluster's driver in another thread, while this process loads its other modules.

    Return None with a local master, which may never need Spark, and under spark-submit, which has started the JVM.
    Errors, and jars that must be downloaded, are left to `spark_session`.
    """
    if settings.local or _submitted():
        return None
    thread = Thread(target=_start_known_jvm, args=(settings,), name="early-jvm", daemon=True)
    thread.start()
    return thread


def _start_known_jvm(settings: SparkSettings) -> None:
    with suppress(SparkUnavailable, PySparkException, Py4JError, OSError):
        check_prerequisites(settings)
        if delta_jars(settings) and "spark.jars.packages" not in settings.conf:
            _prepare_environment(settings)
            _start_jvm(settings)


def starts_on_demand(settings: SparkSettings) -> bool:
    """Whether the start of the session can wait: the master is local, and the start downloads nothing."""
    has_jars = bool(delta_jars(settings)) or _names_delta(settings.conf) or not settings.download
    return settings.local and has_jars and "spark.jars.packages" not in settings.conf and not _submitted()


def _started(settings: SparkSettings) -> SparkSession:
    _prepare_environment(settings)
    _start_jvm(settings)
    delta = _has_class(_EXTENSION)
    builder = SparkSession.builder
    for key, setting in _sql_settings(settings, delta=delta).items():
        builder = builder.config(key, setting)
    session = builder.getOrCreate()
    session.delta = delta
    if not is_local(session.sparkContext.master):
        ship(session)
    return session


def _error_line(exc: Exception) -> str:
    """Return the message of an exception without the JVM stack that Py4J appends to it."""
    lines = str(exc).splitlines() or [type(exc).__name__]
    message = next((text for text in lines if text.startswith(": ")), lines[0])
    return message.removeprefix(": ")[:300]


def has_delta(session: SparkSession) -> bool:
    """Return whether the session can read and write Delta tables; also works for the `sparkSession` of a frame."""
    return _EXTENSION in (session.conf.get("spark.sql.extensions", "") or "")


def delta_jars(settings: SparkSettings, home: Path | None = None) -> tuple[Path, ...]:
    """Return Delta's jar files: those of `settings`, or those of an Ivy cache below `home`; () if neither has any."""
    if settings.delta_jars:
        return tuple(_given(settings.delta_jars))
    for cache in IVY_CACHES:
        jars = tuple(_cached((home or Path.home()) / cache))
        if len(jars) == len(NEEDED_JARS):
            return jars
    return ()


def _given(paths: tuple[str, ...]) -> Iterator[Path]:
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"Delta jar {str(path)!r} does not exist")
        yield from sorted(path.glob("*.jar")) if path.is_dir() else [path]


def _cached(directory: Path) -> Iterator[Path]:
    # Ivy writes <organisation>_<artifact>-<version>.jar
    for name in NEEDED_JARS:
        yield from directory.glob(f"*_{name}")


def is_local(master: str) -> bool:
    """Return whether driver and executors of a master are one process."""
    # local-cluster[2,1,1024] is a cluster on one machine
    return master == "local" or master.startswith("local[")


def _prepare_environment(settings: SparkSettings) -> None:
    if _submitted():
        return
    home = Path(pyspark.__file__).parent
    if (home / "bin" / "spark-submit").is_file():
        # SPARK_HOME may name another Spark, and in a venv that is not activated it is not set
        os.environ["SPARK_HOME"] = str(home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if settings.local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _submitted() -> bool:
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _start_jvm(settings: SparkSettings) -> None:
    if _submitted() or SparkContext._gateway is not None:  # noqa: SLF001 - there is no public attribute
        return
    jars = delta_jars(settings)
    if jars or _names_delta(settings.conf) or not settings.download:
        if not jars and not _names_delta(settings.conf):
            _print_without_delta()
        SparkContext._ensure_initialized(conf=_jvm_conf(settings, jars))  # noqa: SLF001 - the jars are chosen here
        return
    _print(f"downloading {DELTA_PACKAGE} once, into the Ivy cache")
    try:
        SparkContext._ensure_initialized(conf=_jvm_conf(settings, (), package=DELTA_PACKAGE))  # noqa: SLF001
    except PySparkRuntimeError:
        _print_without_delta()
        SparkContext._ensure_initialized(conf=_jvm_conf(settings, ()))  # noqa: SLF001


def _everywhere() -> dict[str, str]:
    has_private_files = configured_umask() & _WRITE_OF_OTHERS == _WRITE_OF_OTHERS
    return EVERYWHERE | (UNIX_SOCKETS if has_private_files else {})


def _names_delta(conf: Mapping[str, str]) -> bool:
    keys = ("spark.jars", "spark.jars.packages", "spark.driver.extraClassPath")
    return any("delta-spark" in conf.get(key, "") for key in keys)


def _jvm_conf(settings: SparkSettings, jars: tuple[Path, ...], package: str = "") -> SparkConf:
    # Hadoop sets the modes of some files by its own umask
    chosen = {**_everywhere(), "spark.hadoop.fs.permissions.umask-mode": f"{configured_umask():03o}"}
    if settings.local:
        log4j = Path(__file__).with_name("log4j2.properties").as_uri()
        options = f"-Dlog4j2.configurationFile={log4j} {_TRUST_ARROW if settings.has_rows else _PLANS_ONLY}"
        chosen |= ON_ONE_MACHINE | {"spark.driver.extraJavaOptions": options}
    else:
        chosen |= ON_A_CLUSTER
    if package:
        chosen |= {"spark.jars.packages": package, "spark.jars.excludes": SHIPPED_BY_SPARK}
    if settings.warehouse:
        chosen["spark.sql.warehouse.dir"] = settings.warehouse
    chosen |= settings.conf
    chosen |= {"spark.master": settings.master, "spark.app.name": settings.app_name}
    _add_jars(chosen, jars, local=settings.local)
    if package and (own := settings.conf.get("spark.jars.packages")):
        chosen["spark.jars.packages"] = f"{own},{package}"
    return SparkConf(loadDefaults=False).setAll(list(chosen.items()))


def _add_jars(chosen: dict[str, str], jars: tuple[Path, ...], *, local: bool) -> None:
    # on one machine the class path is enough; spark.jars would copy each jar for the executor in this process
    key, separator = ("spark.driver.extraClassPath", os.pathsep) if local else ("spark.jars", ",")
    named = [chosen[key]] if chosen.get(key) else []
    if jars:
        chosen[key] = separator.join([*named, *(str(jar.resolve()) for jar in jars)])


def _has_class(name: str) -> bool:
    SparkContext._ensure_initialized()  # noqa: SLF001 - under spark-submit this connects to the waiting JVM
    return bool(SparkContext._jvm.org.apache.spark.util.Utils.classIsLoadable(name))  # noqa: SLF001


def _sql_settings(settings: SparkSettings, *, delta: bool) -> dict[str, str]:
    chosen = dict(_jvm_conf(settings, ()).getAll())
    if _submitted():
        given = {name for name, _ in SparkConf().getAll()} - DECISIVE
        chosen = {name: value for name, value in (_everywhere() | dict(settings.conf)).items() if name not in given}
    for launched in ("spark.driver.extraClassPath", "spark.driver.extraJavaOptions", "spark.driver.memory"):
        chosen.pop(launched, None)
    if delta:
        own = settings.conf.get("spark.sql.extensions")
        chosen["spark.sql.extensions"] = f"{own},{_EXTENSION}" if own else _EXTENSION
        chosen["spark.sql.catalog.spark_catalog"] = _CATALOG
    return chosen


def _print_without_delta() -> None:
    _print(
        "Spark runs without the Delta jars, so only the driver writes Delta tables; set spark.delta_jars to add them"
    )


def _print(line: str) -> None:
    sys.stderr.write(f"cdc: {line}\n")
