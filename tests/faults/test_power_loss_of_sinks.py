"""A loss of power at a random change of the disk: of the log, targets, published records, indexes and progress.

A life is watched once by strace. Each point is a change of the disk in it: the folder is made as a loss of power at
this point leaves it, and another life goes on from there. It ends with what the first one ended with, or it stops with
a code. CDC_POWER_LOSS_POINTS sets the number of points; for a large number the life is longer.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cdc.errors import CdcError
from tests.faults import sink_workload
from tests.faults.disk_states import Call, Death, Disk, traced
from tests.pipelines.shop_pipeline import COPY

POINTS = int(os.environ.get("CDC_POWER_LOSS_POINTS", "10"))
IS_LONG = POINTS > 100
COPIED, LAST = (4_200, COPY + 104) if IS_LONG else (50, COPY + 24)
"""Rows of the first copy, of which a long life writes its key index to the disk; and the last transaction.

In a long life the published record is cleaned up, and a target gets two checkpoints.
"""
DEATHS = (Death.POWER_NAMES, Death.POWER_BYTES, Death.POWER_PART)

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


@dataclass(frozen=True, slots=True)
class Watched:
    """A life that was watched."""

    folder: Path
    before: Path
    """The folder of the pipeline as the life began."""
    calls: list[Call]
    contents: dict[str, Any]
    """What its sinks and its delivery ended with."""

    @property
    def root(self) -> Path:
        return self.folder / "pipeline"


@pytest.fixture(name="watched", scope="module")
def _watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("powered")
    sink_workload.prepare(folder, COPIED)
    shutil.copytree(folder / "pipeline", folder / "before")
    calls = traced(folder / "trace", "tests.faults.sink_workload", folder, LAST)
    yield Watched(folder, folder / "before", calls, sink_workload.contents(folder))
    shutil.rmtree(folder)


@pytest.mark.timeout(max(120, 10 * POINTS))
def test_a_loss_of_power_at_any_write_is_made_up_for_or_stops_with_a_code(watched: Watched) -> None:
    random = Random(47)
    changes = [number for number, _ in enumerate(states(watched))]
    chosen = {number: random.choice(DEATHS) for number in random.sample(changes, min(POINTS, len(changes)))}
    outcomes = Counter[str]()
    for number, disk in enumerate(states(watched)):
        if (death := chosen.get(number)) is None:
            continue
        shutil.rmtree(watched.root)
        disk.leave(death, watched.root)
        outcomes[resumed(watched, f"change {number}, {death}")] += 1
    print(dict(outcomes), f"at {len(chosen)} of {len(changes)} changes")
    assert outcomes.total() == len(chosen)
    assert outcomes["equal"] > len(chosen) / 2, outcomes


def states(watched: Watched) -> Iterator[Disk]:
    """The disk after each call that changed it."""
    disk = Disk(watched.before, watched.root)
    yield disk
    for call in watched.calls:
        if disk.apply(call):
            yield disk


def resumed(watched: Watched, point: str) -> str:
    """Live on after a loss of power: `equal`, or the code with which the pipeline or one of its tables stopped."""
    try:
        sink_workload.resume(watched.folder, LAST)
    except CdcError as exc:
        if exc.code.endswith("000"):
            raise AssertionError(f"{point}: an error without a code of its own") from exc
        return exc.code
    found, codes = sink_workload.contents(watched.folder), Counter[str]()
    for name, expected in watched.contents.items():
        rows = found[name]
        reason = rows[0] if isinstance(rows, tuple) else None
        if isinstance(reason, str):
            codes[reason.split()[0]] += 1
        else:
            assert rows == expected, f"{point}: {name} differs"
    return ", ".join(sorted(codes)) or "equal"
