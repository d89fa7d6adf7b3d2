"""kill -9 of a compaction: the compacted table is as before a step or as after it, and the next one goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.failpoint import VARIABLE
from cdc.log import retired_files
from cdc.log.compacted_table import CompactedState, read_compacted_state
from cdc.log.disk_format import COMPACTED
from cdc.log.reader import LogReader
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from tests.faults.test_kill_reader import KILLED
from tests.fixtures import forked
from tests.pipelines.cold_log import append, folded, histories, interleaved, log_writer, transactions
from tests.pipelines.fold_model import Row, log_row, to_arrow

STEPS = {"compact_written": (1, 1), "compact_committed": (2, 2), "merge_written": (2, 2), "merge_committed": (1, 2)}
"""Failpoint → how many runs it leaves, and up to which of the two horizons they reach."""


@pytest.fixture
def rows() -> list[Row]:
    """Of forty tables, keyed and keyless, with moves, truncates and copies; in the end one of them grows."""
    rows = interleaved(histories(11, 40))
    grown = [log_row(77, (9_000, n), "c", key=[str(n)], after={1: str(n)}) for n in range(5_000)]
    return [*rows, *grown]


@pytest.fixture
def root(tmp_path: Path, rows: list[Row]) -> Path:
    """A log of two stretches, each in segments of its own; the first, the smaller one, is compacted."""
    root = tmp_path / "log"
    writer = log_writer(root)
    every = transactions(rows)
    append(writer, every[:80])
    compact(None, root, everything=True)
    for start in range(80, len(every), 100):
        append(writer, every[start : start + 100])
    (tmp_path / "shop.yaml").write_text(
        "name: shop\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/nowhere'}\ntables: [{match: 't.*'}]\n"
        f"log: {{path: '{root}'}}\nsinks: [{{type: search, name: find, path: '{tmp_path}/find'}}]\n"
    )
    return root


def run(root: Path, failpoint: str | None = None) -> forked.Ended:
    """`python -m pipelines compact`, as the command starts it."""
    command = ("pipelines", "compact", "--everything", "--json", "-c", root.parent / "shop.yaml")
    return forked.run(*command, environment={VARIABLE: failpoint} if failpoint else {}, timeout=90)


def held(root: Path) -> CompactedState:
    found = read_compacted_state(root)
    assert found is not None
    return found


def read(root: Path) -> list[Row]:
    log = LogReader(root)
    return folded(pa.Table.from_batches(log.rows(Position(0), log.durable or Position(0)), LOG_SCHEMA))


def trim(root: Path) -> None:
    """What is compacted, but for the newest segment, so that it is read from the runs."""
    files, horizon = LogReader(root).every_file(), held(root).horizon
    newest = max(file.segment for file in files)
    gone = [file for file in files if file.last <= horizon and file.segment < newest]
    log_writer(root).trim({file.segment for file in gone}, max((file.last for file in gone), default=Position(0)))


@pytest.mark.parametrize("failpoint", ["compact_written", "merge_written", *(
    pytest.param(point, marks=pytest.mark.slow) for point in ("compact_committed", "merge_committed")
)])  # fmt: skip
def test_a_killed_compaction_leaves_each_step_undone_or_done(root: Path, rows: list[Row], failpoint: str) -> None:
    right = folded(to_arrow(rows))
    horizons = held(root).horizon, LogReader(root).durable
    assert run(root, failpoint).status == KILLED
    runs, reached = STEPS[failpoint]
    assert (len(held(root).runs), held(root).horizon) == (runs, horizons[reached - 1])
    trim(root)
    assert LogReader(root).oldest > 0
    assert read(root) == right

    compact(None, root, everything=True)
    assert (len(held(root).runs), held(root).horizon) == (1, horizons[1])
    trim(root)
    assert read(root) == right
    append(log_writer(root), [[rows[-1] | {"position": int(horizons[1] or 0) + 1}]])
    compact(None, root, everything=True)
    known = {found.number for found in held(root).runs} | retired_files.segments_with_removed_files(root, COMPACTED)
    assert {int(found.name.partition("=")[2]) for found in (root / COMPACTED).glob("segment=*")} <= known


def test_the_command_says_what_it_did(root: Path) -> None:
    done = run(root)

    assert done.status == 0, done.errors
    said = json.loads(done.output)
    assert (said["command"], said["ok"]) == ("compact", True)
    assert said["result"]["horizon"] == str(LogReader(root).durable)
    assert said["result"]["merged"] == 2
    assert "merged " in said["summary"]
