"""The steps during the workload, when the demo is stopped before they begin."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from threading import Event

from cdc.demo.backfill_replay_steps import StepSequence
from cdc.demo.lake_queries import LakeQueries
from cdc.demo.terminal import Terminal
from cdc.demo.time_travel_step import TimeTravelStep
from cdc.demo.workspace import Workspace


def test_a_stopped_demo_begins_neither_a_backfill_nor_a_replay(tmp_path: Path) -> None:
    out, stop = StringIO(), Event()
    stop.set()
    queries = LakeQueries(Workspace(tmp_path), "lake")
    steps = StepSequence(TimeTravelStep(queries, Terminal(out), None, altered=False), stop).run()

    assert [(step.name, step.equal) for step in steps] == [("cut", False)]
    assert "backfill" not in out.getvalue()
    assert not (tmp_path / "tour.out").exists()
