"""The whole demo as a command: its steps during the workload, and the final verification."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path

import pytest

from tests.fixtures import forked

SECONDS = 40
"""Of workload: a cold JVM on a busy machine has the first rows of every sink by then."""


@pytest.mark.slow
def test_the_demo_copies_back_replays_and_proves_every_target_equal(folder: Path) -> None:
    with chdir(folder):
        ended = forked.run("cdc", "demo", "--seconds", SECONDS, "--rate", 60, "--json", timeout=600)
    assert ended.status == 0, ended.errors
    envelope = json.loads(ended.output.strip().splitlines()[-1])
    shown = {step["name"]: step for step in envelope["result"]["tour"]}
    assert list(shown) == ["cut", "column", "backfill", "replay"], ended.errors
    assert all(step["equal"] and step["rows"] > 0 for step in shown.values()), ended.errors
    by_spark = next(step for step in envelope["result"]["closing"] if step["name"] == "executors")
    assert by_spark["equal"], ended.errors
    assert by_spark["facts"]["changes"] > 0
    assert "Spark read and folded the backlog of a new sink" in ended.errors
    assert envelope["result"]["tables"]
    assert all(table["equal"] for table in envelope["result"]["tables"])
    assert list(folder.iterdir()) == []
