"""Fixtures come from tests/fixtures, by subject; how the tests share a machine is said here."""

import gc
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import settings
from xdist.scheduler.loadgroup import LoadGroupScheduling

# the machine may be busy; how long an example takes says nothing of what it shows
settings.register_profile("cdc", deadline=None)
settings.load_profile("cdc")

_ASKS_FOR_SPARK: Final = re.compile(r"def test_\w+\([^)]*\bspark\b|getfixturevalue\(\"spark\"\)|def _?\w+\(spark\b")
TOGETHER: Final = {"tests/e2e/test_page.py", "tests/service/test_alerts.py", "tests/test_architecture.py"}
"""Files whose tests share a browser, a Prometheus, and the parsed tree."""
MEMORY: Final = Path("/dev/shm")
ROOM: Final = 8 << 30
"""Bytes that have to be free there: each worker has servers of its own."""


def _in_memory() -> bool:
    """Whether temporary files may go to memory: a fresh database is 300 files, and most tests begin with one."""
    if not MEMORY.is_dir() or "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return False
    found = os.statvfs(MEMORY)
    return found.f_bavail * found.f_frsize >= ROOM and not found.f_flag & os.ST_NOEXEC


if _in_memory():
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

# a JVM of a test lives for seconds: what the second compiler would make of its code comes too late to be of use, and
# to verify the thousands of classes that Spark loads is a tenth of its start
os.environ.setdefault(
    "JDK_JAVA_OPTIONS",
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
)

pytest_plugins = [
    "tests.fixtures.cluster",
    "tests.fixtures.moved_clock",
    "tests.fixtures.once",
    "tests.fixtures.postgres",
    "tests.fixtures.pipeline",
    "tests.fixtures.s3",
    "tests.fixtures.spark",
]


def pytest_xdist_auto_num_workers() -> int:
    """Two a core: most tests wait for a server more than they compute."""
    return 2 * (os.cpu_count() or 1)


class OneSparkScheduling(LoadGroupScheduling):  # type: ignore[misc]
    """Each test by itself to who is free, but a few files whole, and all that use the Spark session to one worker.

    A JVM costs more than most of its tests. (Marks of groups are not seen under this pytest.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if _uses_spark(file):
            return "spark"
        return file if file in TOGETHER else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneSparkScheduling:
    """How tests are dealt out to the workers."""
    return OneSparkScheduling(config, log)


@cache
def _uses_spark(file: str) -> bool:
    return _ASKS_FOR_SPARK.search((Path(__file__).parents[1] / file).read_text(encoding="utf-8")) is not None


def pytest_collection_finish() -> None:
    """Thousands of collected tests live to the end: the garbage collector need not look at them ever again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _spark_in_its_worker(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whoever starts the JVM in this process has to ask for the fixture, so that it is dealt to the right worker."""
    before = _has_jvm()
    yield
    assert before or not _has_jvm() or _uses_spark(request.node.nodeid.partition("::")[0]), "it starts Spark"


def _has_jvm() -> bool:
    context = sys.modules.get("pyspark.core.context")
    return context is not None and context.SparkContext._gateway is not None
