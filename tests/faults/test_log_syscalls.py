"""A log's processes struck at their system calls that change the disk: killed there, or refused once by the storage.

A call is counted in each thread by itself, so the nth of them strikes the thread that comes to it first. Writes are
left to test_power_loss.py: most of them are how the threads of delta-rs wake each other.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from cdc.log.writer import LogWriter
from tests.faults.forked_strace import traced
from tests.faults.log_workload import CLOSED, aged, assert_lived, assert_whole, live_on
from tests.fixtures.waiting import PATIENCE
from tests.log.rows import IDENTITY

CALLS = {
    "fsync": "fsync,fdatasync",
    "rename": "rename,renameat,renameat2",
    "link": "link,linkat",
    "unlink": "unlink,unlinkat",
    "mkdir": "mkdir,mkdirat,rmdir",
    "truncate": "truncate,ftruncate,fallocate",
}
NEVER_MADE = {"truncate"}
"""Listed so that a later version of a library that makes such calls is tried as well."""
KILLED = -signal.SIGKILL
STEP = 8
"""The calls are dealt to so many tests."""
SLOW = pytest.mark.slow
KILLS = [("fsync", 70), pytest.param("link", 2, marks=SLOW)]
"""Tried by default."""
REFUSED = {
    "ENOSPC": ("fsync", "link", "mkdir"),
    "EDQUOT": ("link", "rename"),
    "EIO": ("fsync",),
    "EROFS": ("rename", "unlink"),
}
NTHS = {"fsync": (2, 9, 33, 90)}
REFUSALS = [
    (error, call, nth) for error, calls in REFUSED.items() for call in calls for nth in NTHS.get(call, (1, 2, 5))
]

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


def struck(root: Path, calls: str, how: str, *, patient: bool = False) -> tuple[int, int]:
    """Live on in another process, its calls struck; how it ended, and the last position that was confirmed."""
    confirmed = root.parent / "confirmed"
    confirmed.write_bytes(bytes(8))
    options = ["-e", f"trace={calls}", "-e", f"inject={calls}:{how}"]
    life = ("tests.faults.log_workload", root, confirmed, *(["patient"] if patient else []))
    with (root.parent / "printed").open("w+") as output:
        with traced(options, root.parent / "trace", *life, output=output) as process:
            status = process.wait(PATIENCE)
        output.seek(0)
        assert status in {0, KILLED, *([1] if patient else [])}, output.read()
    return status, int.from_bytes(confirmed.read_bytes(), sys.byteorder)


@pytest.fixture(name="roots", scope="module", params=["new", pytest.param("aged", marks=SLOW)])
def _roots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Path]]:
    """Logs at the beginning of their lives, one after the other in the same place."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "first").mkdir()
    if request.param == "aged":
        aged(folder / "first")

    def next_root() -> Iterator[Path]:
        while True:
            shutil.rmtree(folder / "log", ignore_errors=True)
            shutil.copytree(folder / "first", folder / "log")
            yield folder / "log"

    yield next_root()
    shutil.rmtree(folder)


def assert_goes_on(root: Path, confirmed: int) -> None:
    """All that was confirmed is there, and the next life comes to its end."""
    LogWriter.open(root, IDENTITY, CLOSED)
    assert_whole(root, confirmed)
    live_on(root, lambda _position: None)
    assert_lived(root)


@pytest.mark.parametrize(("call", "nth"), KILLS)
def test_a_log_whose_process_is_killed_before_a_change_of_the_disk_loses_and_doubles_nothing(
    roots: Iterator[Path], call: str, nth: int
) -> None:
    root = next(roots)
    code, confirmed = struck(root, CALLS[call], f"signal=KILL:when={nth}")
    assert code == KILLED, "the test tries nothing"
    assert_goes_on(root, confirmed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1, STEP + 1))
@pytest.mark.parametrize("call", CALLS)
def test_a_log_whose_process_is_killed_before_any_change_of_the_disk_loses_and_doubles_nothing(
    roots: Iterator[Path], call: str, first: int
) -> None:
    for nth in count(first, STEP):
        root = next(roots)
        code, confirmed = struck(root, CALLS[call], f"signal=KILL:when={nth}")
        assert_goes_on(root, confirmed)
        if code != KILLED:
            assert nth > 1 or call in NEVER_MADE, "the test tries nothing"
            break


@pytest.mark.slow
@pytest.mark.parametrize(("error", "call", "nth"), REFUSALS)
def test_a_log_whose_storage_refuses_a_change_once_loses_and_doubles_nothing(
    roots: Iterator[Path], error: str, call: str, nth: int
) -> None:
    """The appends wait until it takes again; a compaction or a word that failed is for the next life."""
    root = next(roots)
    _, confirmed = struck(root, CALLS[call], f"error={error}:when={nth}", patient=True)
    injected = "INJECTED" in (root.parent / "trace").read_text()
    assert injected or nth == 5, "the test tries nothing"
    assert_goes_on(root, confirmed)
