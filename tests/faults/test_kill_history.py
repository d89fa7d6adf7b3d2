"""kill -9 while a target that keeps history is written: the next driver leaves the same versions, marks and changes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cdc.config.delta_sink import HistoryMode
from cdc.failpoint import VARIABLE
from tests.contracts.histories import MODELS, SETTINGS, Lake, kept
from tests.faults.history_driver import ENDS, HISTORY, drive
from tests.fixtures import forked

KILLED = -signal.SIGKILL
POINTS = ["delta_before_merge", "delta_after_merge", "delta_after_ending", "delta_after_ending:2"]


def killed(folder: Path, keeping: HistoryMode, upto: int, point: str) -> bool:
    """Whether a driver in a process of its own was killed there."""
    environment = {VARIABLE: point}
    ended = forked.run("tests.faults.history_driver", folder, keeping.value, upto, environment=environment)
    return ended.status == KILLED


CASES = [(keeping, point) for keeping in SETTINGS for point in POINTS]


@pytest.mark.parametrize(
    ("keeping", "point"),
    [
        case if case == (HistoryMode.VERSIONS, POINTS[1]) else pytest.param(*case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_driver_killed_at_a_step_is_followed_by_one_that_ends_the_same(
    tmp_path: Path, keeping: HistoryMode, point: str
) -> None:
    if keeping is HistoryMode.CHANGES and "ending" in point:
        point = "delta_before_publish"
    drive(str(tmp_path), keeping, 10)
    assert killed(tmp_path, keeping, ENDS[-1], point)
    for upto in ENDS:  # a shorter range than the one that was begun comes first
        drive(str(tmp_path), keeping, upto)
    assert kept(Lake(str(tmp_path), SETTINGS[keeping]), keeping) == MODELS[keeping](HISTORY)
