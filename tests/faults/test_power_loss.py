"""A log after each change of the disk that its processes make, as a kill leaves it and as a loss of power does.

A life is watched once, and each state that it can be left in is made from that: every change of the disk is tried.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cdc.log.writer import LogWriter
from tests.faults.disk_states import Call, Death, Disk, traced
from tests.faults.log_workload import CLOSED, LAST, aged, assert_lived, assert_whole, live_on
from tests.log.rows import IDENTITY

SOME = 61
"""By default every so manieth change is tried."""
FOLLOWED = 40
"""After every so manieth of those tried another life goes on."""

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


@dataclass(frozen=True, slots=True)
class Watched:
    """A life that was watched."""

    before: Path
    """The log as it began."""
    root: Path
    """Where it was lived."""
    calls: list[Call]


@pytest.fixture(name="watched", scope="module", params=["new", pytest.param("aged", marks=pytest.mark.slow)])
def _watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The life of a log that is made, and of one whose tables make a checkpoint and clean up."""
    folder = tmp_path_factory.mktemp(request.param)
    before, root = folder / "before", folder / "log"
    before.mkdir()
    if request.param == "aged":
        aged(before)
    shutil.copytree(before, root)
    (folder / "confirmed").touch()
    yield Watched(before, root, traced(folder / "trace", "tests.faults.log_workload", root, folder / "confirmed"))
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("deaths", "step"),
    [
        *(pytest.param([death], 1, id=f"{death.name}-every", marks=pytest.mark.slow) for death in Death),
        pytest.param([Death.POWER_NAMES, Death.POWER_BYTES], SOME, id="POWER-some"),
    ],
)
def test_whatever_a_death_leaves_holds_what_was_confirmed_once_and_whole_and_the_next_life_goes_on(
    watched: Watched, tmp_path: Path, deaths: list[Death], step: int
) -> None:
    tried = 0
    for changes, (disk, confirmed) in enumerate(moments(watched)):
        if changes % step:
            continue
        tried += 1
        for death in deaths:
            disk.leave(death, left := tmp_path / "left")
            LogWriter.open(left, IDENTITY, CLOSED)  # it repairs a commit that was never confirmed
            assert_whole(left, confirmed)
            if tried % (FOLLOWED if step == 1 else FOLLOWED // 10) == 0:
                live_on(left, lambda _position: None)
                assert_lived(left)
            shutil.rmtree(left)
    assert tried > 5
    assert confirmed == LAST


def moments(watched: Watched) -> Iterator[tuple[Disk, int]]:
    """The disk after each call that changed it, and the last position that was confirmed by then."""
    disk, confirmed = Disk(watched.before, watched.root), 0
    yield disk, confirmed
    for call in watched.calls:
        if call.name.startswith("pwritev"):
            confirmed = int.from_bytes(call.content, sys.byteorder)
        elif disk.apply(call):
            yield disk, confirmed
