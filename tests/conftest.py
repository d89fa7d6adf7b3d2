"""Fixtures come from tests/fixtures, by subject; how the tests share a machine is said here."""

import gc
import inspect
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from xdist.scheduler.loadgroup import LoadGroupScheduling

from tests.fixtures import forked, java
from tests.fixtures.examples import register_profiles
from tests.fixtures.postgres_programs import OTHERS, provide_chosen
from tests.fixtures.skips import CI, refuse_unlisted

register_profiles()
provide_chosen()

_SPARK: Final = "spark"
_FOLDER: Final = pytest.StashKey[TemporaryDirectory[str]]()
"""Where each worker writes its process id, and which tests share a worker: the scheduler knows neither."""
_ORIGIN: Final = pytest.StashKey[forked.Origin]()
"""What workers and processes under test are forked from: importing the product once is enough for all of them."""
_WAITED_FOR: Final = pytest.StashKey[forked.Origin]()
"""The same, until it is ready."""
_GETS_SPARK: Final = 'getfixturevalue("spark")'
_OF_MODULE: Final = 'scope="module"'
TOGETHER: Final = {"tests/test_architecture.py", "tests/test_language.py"}
"""Files whose tests share the parsed tree, without a fixture."""
LONG: Final = (
    "tests/test_readme.py",
    "tests/demo/",
    "tests/faults/test_drifted_table.py",
    "tests/faults/test_given_up_file.py",
    "tests/faults/test_kill_copy.py",
    "tests/faults/test_two_readers.py",
    "tests/faults/test_two_workers.py",
    "tests/faults/test_unreadable_row.py",
)
"""With tests of 15 s and more: at the end, one of them would run alone while the other workers are idle."""
NICE: Final = 3
"""Nice value of the workers without Spark's tests: a process gets half as much of a core that others want as well."""
MEMORY: Final = Path("/dev/shm")
ROOM: Final = 8 << 30
"""Bytes that have to be free there: each worker has servers of its own."""


def _in_memory() -> bool:
    """Whether temporary files may go to memory: a fresh database is 300 files, and most tests begin with one."""
    if not MEMORY.is_dir() or "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return False
    found = os.statvfs(MEMORY)
    return found.f_bavail * found.f_frsize >= ROOM and not found.f_flag & os.ST_NOEXEC


# a shell ignores ^C on behalf of what it starts in the background, and commands under test would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if _in_memory():
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

os.environ.setdefault(java.VARIABLE, java.options())

gc.disable()  # until all tests are collected: what is made meanwhile lives to the end

pytest_plugins = [
    "tests.fixtures.shared_servers",  # before those that import it, so that pytest rewrites its assertions
    "tests.fixtures.brokers",
    "tests.fixtures.artemis",
    "tests.fixtures.aws",
    "tests.fixtures.s3",  # before that of clusters, for the same reason
    "tests.fixtures.cluster",
    "tests.fixtures.kafka",
    "tests.fixtures.kafka_cluster",
    "tests.fixtures.moved_clock",
    "tests.fixtures.once",
    "tests.fixtures.opensearch",
    "tests.fixtures.postgres",
    "tests.fixtures.replicated_postgres",
    "tests.fixtures.pipeline",
    "tests.fixtures.process_logging",
    "tests.fixtures.pubsub",
    "tests.fixtures.search_stores",
    "tests.fixtures.slow_share",
    "tests.fixtures.spark",
]


def pytest_xdist_auto_num_workers() -> int:
    """Five for two cores, which they keep busy: each worker takes 15 s of their time until its first test."""
    return 2 * (os.cpu_count() or 1) + 1


class OneSparkScheduling(LoadGroupScheduling):  # type: ignore[misc]
    """Each test goes to a free worker; some files go whole, and the tests of an expensive fixture to one worker.

    A JVM or a server of a further version costs more than most of its tests. (Marks of groups are not seen under this
    pytest.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if nodeid in self._shared:
            return self._shared[nodeid]
        return file if file in TOGETHER or _shares_fixtures(file) else nodeid

    def _assign_work_unit(self, node: Any) -> None:
        """Give the worker of Spark's tests more of the cores than others: it alone can take these tests."""
        is_spark = next(iter(self.workqueue)) == _SPARK
        super()._assign_work_unit(node)
        for worker, note in self._notes.items() if is_spark else ():
            if worker != node.gateway.id:
                with suppress(ProcessLookupError):  # it has crashed
                    os.setpriority(os.PRIO_PROCESS, note["pid"], NICE)

    def _reschedule(self, node: Any) -> None:
        """Forget the units that have ended: counting what is pending would take longer with each test."""
        units = self.assigned_work[node]
        for scope in [scope for scope, tests in units.items() if all(tests.values())]:
            del units[scope]
        super()._reschedule(node)

    @cached_property
    def _shared(self) -> dict[str, str]:
        """The expensive fixture of a test, by identifier."""
        return {nodeid: name for note in self._notes.values() for nodeid, name in note["shared"].items()}

    @cached_property
    def _notes(self) -> dict[str, Any]:
        """What each worker wrote, by its identifier. All have collected when it is asked for first."""
        files = Path(self.config.stash[_FOLDER].name).iterdir()
        return {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneSparkScheduling:
    """How tests are dealt out to the workers."""
    gc.enable()  # in the controller, which collects no tests
    return OneSparkScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Start the process that the workers are forked from: it imports modules while others make what is missing."""
    config.stash[_FOLDER] = TemporaryDirectory()
    origin = config.stash[_ORIGIN] = config.stash[_WAITED_FOR] = forked.Origin(len(specs))
    os.environ[forked.ADDRESS] = origin.address
    for spec in specs:
        spec.python = f"{sys.executable} {forked.__file__}"


def pytest_configure_node(node: Any) -> None:
    """Say to a worker where it writes which tests share a worker."""
    node.workerinput["shared_fixtures"] = node.config.stash[_FOLDER].name


def pytest_xdist_node_collection_finished(node: Any) -> None:
    """Wait until processes under test can be forked, and the kernels are compiled."""
    if (origin := node.config.stash.get(_WAITED_FOR, None)) is not None:
        origin.wait_until_ready()
        del node.config.stash[_WAITED_FOR]


def pytest_unconfigure(config: pytest.Config) -> None:
    """In the controller: end that process, and remove the folder."""
    if _FOLDER in config.stash:
        config.stash[_ORIGIN].close()
        config.stash[_FOLDER].cleanup()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker: put the long tests first, and name the tests of an expensive fixture to the scheduler."""
    given: dict[str, str] | None = getattr(config, "workerinput", None)
    if given is None:
        return
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    shared = {item.nodeid: fixture for item in items if (fixture := _expensive_fixture(item))}
    note = {"pid": os.getpid(), "shared": shared}
    Path(given["shared_fixtures"], given["workerid"]).write_text(json.dumps(note), encoding="utf-8")


def _expensive_fixture(item: pytest.Item) -> str | None:
    """The fixture that the test, or its parameter, asks for, and that one worker builds for all such tests."""
    assert isinstance(item, pytest.Function)
    if _uses_spark(item):
        return _SPARK
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    # not every object can be compared with a text
    chosen = {value for value in parameters if isinstance(value, str)}
    return next((name for name in OTHERS if name in item.fixturenames or name in chosen), None)


def _uses_spark(item: pytest.Item) -> bool:
    """Whether it asks for the session by name, or with `getfixturevalue`, itself or a fixture of this parameter."""
    assert isinstance(item, pytest.Function)
    if "spark" in item.fixturenames or _gets_spark(item.function):
        return True
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    asking = [name for name, found in item._fixtureinfo.name2fixturedefs.items() if _gets_spark(found[-1].func)]
    return any("spark" in str(chosen.get(name, "spark")) for name in asking)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI: a test that is skipped for a reason that nobody has listed fails."""
    report = yield
    if CI:
        refuse_unlisted(report)
    return report


@cache
def _shares_fixtures(file: str) -> bool:
    """Whether the tests of this file share what a fixture of the module builds, which each worker would build again."""
    return _OF_MODULE in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")


@cache
def _gets_spark(function: Callable[..., Any]) -> bool:
    file = inspect.getsourcefile(function)
    if file is None or not file.startswith(str(Path(__file__).parent)):
        return False
    return _GETS_SPARK in Path(file).read_text(encoding="utf-8") and _GETS_SPARK in inspect.getsource(function)


def pytest_collection_finish() -> None:
    """Thousands of collected tests live to the end: the garbage collector need not look at them ever again.

    What little was garbage by then stays, because looking for it takes each worker half a second.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # a worker has memory to spare, and less of its time


@pytest.fixture(autouse=True)
def _spark_in_its_worker(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that starts the JVM in this process has to ask for the fixture, so that it goes to the right worker."""
    before = _has_jvm()
    yield
    assert before or not _has_jvm() or _uses_spark(request.node), "it starts Spark"


def _has_jvm() -> bool:
    context = sys.modules.get("pyspark.core.context")
    return context is not None and context.SparkContext._gateway is not None
