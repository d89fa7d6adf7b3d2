"""kill -9 of a driver that looks after its targets: every kept cut stays whole, and the next driver goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc.failpoint import VARIABLE
from cdc.position import Position
from cdc.target_names import published_uri
from cdc.targets.lake_reader import Lake, read_target
from pipelines.sinks.delta.maintenance import COMPACT_ABOVE
from pipelines.sinks.delta.published_cuts_table import CLEAN_EVERY
from pipelines.sinks.delta.settings import Writer
from tests.faults import maintenance_driver
from tests.faults.maintenance_driver import path_in
from tests.fixtures import forked

KILLED = -signal.SIGKILL
FAILPOINTS = [
    "delta_rewrite_written",
    "delta_rewrite_committed",
    "delta_rewrite_committed:3",
    "delta_cuts_thinned",
    "delta_upkeep_remove",
    "delta_upkeep_remove:30",
    "delta_log_shortened",
    "delta_log_shortened:30",
]
BY_DELTA_RS = ["delta_upkeep_compacted", "delta_upkeep_remove"]
ORDERING = ["delta_upkeep_ordered", "delta_upkeep_remove", "delta_upkeep_ordered:3"]
ROUNDS = CLEAN_EVERY + 30


def live(
    folder: Path, rounds: int, failpoint: str | None = None, by: str = "", writer: Writer = Writer.AUTO
) -> forked.Ended:
    command = ("tests.faults.maintenance_driver", folder, rounds, writer.value, *filter(None, [by]))
    return forked.run(*command, environment={VARIABLE: failpoint} if failpoint else {}, timeout=120)


def assert_kept_cuts_are_whole(folder: Path) -> int:
    """The oldest, every tenth and the newest are read as they were; the position of the newest."""
    lake = Lake.open(path_in(folder))
    cuts = lake.cuts()
    for cut in {*cuts[::10], cuts[-1]}:
        ((target, version),) = lake.cut(Position(cut.position)).versions.items()
        rows = read_target(target, version).read_all()
        assert sorted(rows["id"].to_pylist()) == list(range(1, cut.position // 10 + 1))
    return cuts[-1].position


@pytest.mark.slow
def test_a_driver_killed_in_its_upkeep_at_one_step_after_the_other_leaves_every_kept_cut_whole(tmp_path: Path) -> None:
    for failpoint in FAILPOINTS:
        ended = live(tmp_path, ROUNDS, failpoint)
        assert ended.status == KILLED, f"{failpoint}\n{ended.errors}"
        assert_kept_cuts_are_whole(tmp_path)
    for failpoint in BY_DELTA_RS:
        ended = live(tmp_path, ROUNDS, failpoint, writer=Writer.COPY_ON_WRITE)
        assert ended.status == KILLED, f"{failpoint}\n{ended.errors}"
        assert_kept_cuts_are_whole(tmp_path)
    for failpoint in ORDERING:
        ended = live(tmp_path, ROUNDS, failpoint, by="item")
        assert ended.status == KILLED, f"{failpoint}\n{ended.errors}"
        assert_kept_cuts_are_whole(tmp_path)
    ended = live(tmp_path, ROUNDS)
    assert ended.status == 0, ended.errors
    assert assert_kept_cuts_are_whole(tmp_path) >= 10 * ROUNDS


@pytest.mark.slow
def test_over_two_thousand_small_merges_files_and_logs_stay_few(tmp_path: Path) -> None:
    target, record = tmp_path / "shop" / "orders", Path(published_uri(path_in(tmp_path)))
    most: dict[str, int] = {}
    for number in maintenance_driver.live(str(tmp_path), 2_000):
        if number % 90:
            continue
        found = {
            "live": len(DeltaTable(str(target)).file_uris()),
            "files": len(list(target.glob("*.parquet"))),
            "logs": len(list((target / "_delta_log").iterdir())),
            "bytes": sum(file.stat().st_size for file in target.rglob("*") if file.is_file()),
            "cuts": len(Lake.open(path_in(tmp_path)).cuts()),
            "records": len(DeltaTable(str(record)).file_uris()),
        }
        most = {name: max(amount, most.get(name, 0)) for name, amount in found.items()}
    assert most["live"] <= COMPACT_ABOVE + 16  # further merges add files while small ones are merged
    assert most["files"] <= 3 * CLEAN_EVERY
    assert most["logs"] <= 5 * CLEAN_EVERY
    assert max(most["cuts"], most["records"]) <= CLEAN_EVERY + 1
    assert most["bytes"] <= 16 << 20
    assert assert_kept_cuts_are_whole(tmp_path) == 20_000
