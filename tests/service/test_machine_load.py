"""Machine load: the processor time of a pipeline's processes and of their children, as the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from cdc.service.machine_load import LoadMeter, MachineLoad, available_cores
from tests.fixtures.waiting import until

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")  # noqa: PTH110
BUSY = "import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: pass"
"""Ends by itself if the test was killed."""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}, 'child'])"


@pytest.fixture(name="apply")
def _apply() -> Iterator[int]:
    """The pid of a process called `apply` that does nothing, with a child that is busy."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "apply"], start_new_session=True)
    yield parent.pid
    os.killpg(parent.pid, 9)
    parent.wait()


def test_a_process_is_found_by_a_word_of_the_title_that_it_has_set() -> None:
    """A process that was forked has its whole command line in one argument."""
    title = "import setproctitle; setproctitle.setproctitle('python -m pipelines apply -c shop.yaml')\n"
    with subprocess.Popen([sys.executable, "-c", title + BUSY]) as process:
        meter = LoadMeter()

        def is_found() -> bool:
            load = meter.measure(time.monotonic(), {"apply": process.pid})
            return load is not None and load.pipeline > 0

        until(is_found, "the time of the process to be counted", seconds=60)
        process.kill()


def spent_by_children_of(pid: int) -> float:
    """Seconds of processor time, as ps counts it."""
    told = subprocess.run(
        ["ps", "--ppid", str(pid), "-o", "cputimes="], capture_output=True, text=True, check=False
    ).stdout.split()
    return float(sum(map(int, told)))


def test_a_child_of_a_process_counts_as_the_process_and_one_that_is_called_otherwise_is_none_of_ours(
    apply: int,
) -> None:
    until(lambda: spent_by_children_of(apply) >= 1, "a second spent", seconds=60)
    meters, began = {word: LoadMeter() for word in ("apply", "reader")}, time.monotonic()

    def measured() -> list[MachineLoad] | None:
        found = [meter.measure(time.monotonic(), {word: apply}) for word, meter in meters.items()]
        known = [load for load in found if load is not None]
        return known if len(known) == len(meters) and known[0].pipeline > 0 else None

    ours, other = until(measured, "some time spent", seconds=60)
    assert 0 < ours.pipeline <= available_cores() * 1.1
    assert 0 < ours.busy_share <= 1
    assert time.monotonic() - began >= 2
    assert other.pipeline == 0


def test_the_first_sample_and_one_too_soon_after_it_say_nothing() -> None:
    meter = LoadMeter()
    assert meter.measure(0.0, {}) is None
    assert meter.measure(0.5, {}) is None


@pytest.mark.parametrize(
    ("pipeline", "busy_share", "lag", "reason"),
    [
        (1.83, 0.99, 1.8, "this machine is too slow for the present rate of changes: the pipeline uses 1.8 of 2 cores"),
        (0.6, 0.99, 1.8, "this machine is busy: the pipeline uses 0.6 of 2 cores, and other processes use the rest"),
        (0.6, 0.4, 1.8, None),  # the processors are idle: the lag has another reason
        (1.83, 0.99, 0.6, None),  # busy, and not late
        (1.83, 0.99, None, None),
    ],
)
def test_a_lag_has_a_reason_where_the_processors_have_nothing_left(
    pipeline: float, busy_share: float, lag: float | None, reason: str | None
) -> None:
    assert MachineLoad(2.0, pipeline, busy_share).reason(lag) == reason
