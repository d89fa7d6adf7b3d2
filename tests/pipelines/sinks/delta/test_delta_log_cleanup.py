"""The `_delta_log` of a target stays short, and every listed version stays readable."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

from pipelines.sinks.delta.delta_log_cleanup import CHECKPOINT_EVERY, CHECKPOINTS_AT_ONCE, is_newest, remove_old_commits
from pipelines.sinks.delta.maintenance import UpkeepSettings
from tests.pipelines.sinks.maintained_sink import MaintainedSink

EVERY = 10
"""Versions between two checkpoints."""


def table_of(folder: Path, versions: int) -> str:
    """A table whose version n has n rows."""
    uri = str(folder / "a table")
    DeltaTable.create(uri, pa.schema([("n", pa.int64())]), configuration={"delta.checkpointInterval": str(EVERY)})
    appended(uri, versions)
    return uri


def appended(uri: str, versions: int) -> None:
    """One row in each of so many versions: delta-rs makes the first commit, the others are copies with other files."""
    table = DeltaTable(uri)
    write_deltalake(table, pa.table({"n": [0]}), mode="append")
    first = table.version()
    text = Path(uri, "_delta_log", f"{first:020d}.json").read_text()
    (path,) = (action["add"]["path"] for line in text.splitlines() if "add" in (action := json.loads(line)))
    for version in range(first + 1, first + versions):
        Path(uri, "_delta_log", f"{version:020d}.json").write_text(text.replace(path, f"{version}.parquet"))
        if (version + 1) % EVERY == 0:
            DeltaTable(uri).create_checkpoint()


def changed_nothing(uri: str, commits: int) -> None:
    """So many commits, in the middle of which is a checkpoint."""
    first = DeltaTable(uri).version() + 1
    for number in range(commits):
        Path(uri, "_delta_log", f"{first + number:020d}.json").write_text('{"commitInfo":{"timestamp":0}}\n')
        if number == commits // 2:
            DeltaTable(uri).create_checkpoint()


def rows(uri: str, version: int | None = None) -> int:
    """As the log tells them: no file of rows ever goes here."""
    return sum(pa.table(DeltaTable(uri, version=version).get_add_actions())["num_records"].to_pylist())


def names(uri: str) -> list[str]:
    return sorted(path.name for path in Path(uri, "_delta_log").iterdir())


@pytest.mark.parametrize(
    ("newest", "kept", "listed", "gone"),
    [(37, 10, (3, 9, 13, 14), 17), pytest.param(67, 15, (3, 19, 23, 24, 41), 30, marks=pytest.mark.slow)],
)
def test_listed_versions_and_the_newest_ones_stay_readable_and_the_rest_goes(
    tmp_path: Path, newest: int, kept: int, listed: tuple[int, ...], gone: int
):
    uri, first = table_of(tmp_path, newest), newest - kept
    before = len(names(uri))

    removed = remove_old_commits(uri, newest, listed, kept=kept)

    assert [rows(uri, version) for version in listed] == list(listed)
    assert [rows(uri, version) for version in range(first, newest + 1)] == list(range(first, newest + 1))
    assert rows(uri) == newest
    # a checkpoint and a commit each; the last checkpoint up to 27 is that of 19, and up to 52 that of 49
    begins = {27: 19, 52: 49}[first]
    assert len([name for name in names(uri) if name[:20].isdigit() and int(name[:20]) < begins]) == 2 * len(listed)
    assert len(names(uri)) == before - removed + len(set(listed) - {9, 19})
    with pytest.raises(DeltaError):
        rows(uri, gone)
    assert remove_old_commits(uri, newest, listed, kept=kept) == 0


def test_what_is_not_listed_any_more_goes_the_next_time(tmp_path: Path):
    uri = table_of(tmp_path, 45)
    remove_old_commits(uri, 45, (5, 25), kept=10)

    assert remove_old_commits(uri, 45, (25,), kept=10) == 2
    assert rows(uri, 25) == 25


def test_a_version_that_is_listed_briefly_stays_readable_by_its_commits(tmp_path: Path):
    uri = table_of(tmp_path, 45)
    checkpoints = {name for name in names(uri) if "checkpoint" in name}
    remove_old_commits(uri, 45, (13, 25), kept=10, brief={25})

    assert [rows(uri, version) for version in (13, 25)] == [13, 25]
    new = {name for name in names(uri) if "checkpoint" in name} - checkpoints
    assert new == {f"{13:020d}.checkpoint.parquet"}
    remove_old_commits(uri, 45, (25,), kept=10)
    assert rows(uri, 25) == 25


def test_before_a_checkpoint_stands_behind_the_newest_nothing_goes(tmp_path: Path):
    uri = table_of(tmp_path, 25)

    assert remove_old_commits(uri, 25, kept=20) == 0
    assert rows(uri, 1) == 1


def test_more_listed_versions_than_one_call_gives_checkpoints_keep_what_they_are_read_with(tmp_path: Path):
    uri = table_of(tmp_path, 60)
    listed = list(range(2, 49, 2))
    assert len(listed) > CHECKPOINTS_AT_ONCE

    remove_old_commits(uri, 60, listed, kept=10)
    assert [rows(uri, version) for version in listed] == listed
    remove_old_commits(uri, 60, listed, kept=10)
    assert [rows(uri, version) for version in listed] == listed


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_any_listing_at_any_time_stays_readable(tmp_path: Path, seed: int):
    random, listed = Random(seed), set[int]()
    uri = table_of(tmp_path, 1)
    for _ in range(6):
        appended(uri, random.randrange(1, 25))
        newest = DeltaTable(uri).version()
        listed = {version for version in listed if random.random() < 0.7} | {newest}
        remove_old_commits(uri, newest, listed, kept=random.choice([5, 12]))
        appended(uri, 1)
        assert [rows(uri, version) for version in sorted(listed)] == sorted(listed)
        assert rows(uri) == newest + 1


def test_it_is_the_newest_until_somebody_commits(tmp_path: Path):
    uri = table_of(tmp_path, 3)

    assert is_newest(uri, 3)
    assert not is_newest(uri, 2)
    assert not is_newest(uri, 4)
    appended(uri, 1)
    assert not is_newest(uri, 3)
    assert not is_newest(f"file://{uri}", 4)


def test_a_commit_that_was_removed_does_not_make_the_one_before_it_the_newest(tmp_path: Path):
    """A driver that slept through 60 commits would go on in the gap, where no reader looks."""
    uri = table_of(tmp_path, 60)
    remove_old_commits(uri, 60, (5,), kept=10)

    assert Path(uri, "_delta_log", f"{5:020d}.json").exists()
    assert not Path(uri, "_delta_log", f"{6:020d}.json").exists()
    assert not is_newest(uri, 5)


@pytest.mark.parametrize(
    ("commits", "keep"),
    [
        (2 * CHECKPOINT_EVERY + 20, 40),  # more than half of them stand between a cut and the checkpoint before it
        pytest.param(300, 100, marks=pytest.mark.slow),
        pytest.param(1_000, 100, marks=pytest.mark.slow),
    ],
)
def test_a_busy_target_has_a_short_log_and_every_kept_cut(tmp_path: Path, commits: int, keep: int):
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=1, vacuum_after=0, keep_commits=keep))
    upkept.round()
    for _ in range(2):
        changed_nothing(upkept.uri, commits)
        upkept.round()
        upkept.clock.now += 2
        upkept.look()

    assert len(names(upkept.uri)) < commits
    assert upkept.assert_every_kept_cut_is_whole() == 3


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_spark_reads_a_listed_version_behind_which_the_log_was_shortened(spark: SparkSession, tmp_path: Path):
    uri = table_of(tmp_path, 60)
    remove_old_commits(uri, 60, (23,), kept=10)

    def counted(**options: int) -> int:
        return spark.read.format("delta").options(**options).load(uri).count()

    assert (counted(versionAsOf=23), counted(), counted(versionAsOf=55)) == (23, 60, 55)
