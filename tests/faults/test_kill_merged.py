"""kill -9 while shards of one target are written one after the other: the next driver leaves each of them exact."""

from __future__ import annotations

import signal
from pathlib import Path
from random import Random

import pytest

from cdc.failpoint import VARIABLE
from cdc.targets.lake_reader import Lake
from tests.faults.merged_driver import ENDS, SHARDS, batch, drive, driver, expected, held, held_apart, stop
from tests.fixtures import forked
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import run_sql

KILLED = -signal.SIGKILL
POINTS = [
    *(f"delta_{side}_merge:{nth}" for nth in (1, 2, 3) for side in ("before", "after")),
    "delta_before_columns",
    "delta_after_columns",
    "delta_before_publish",
]
ALWAYS = {"delta_after_merge:2", "delta_after_columns"}
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))]


def killed(folder: str, upto: int, point: str, *more: str) -> bool:
    """Whether a driver in a process of its own was killed there."""
    environment = {VARIABLE: point}
    return forked.run("tests.faults.merged_driver", folder, upto, *more, environment=environment).status == KILLED


@pytest.mark.parametrize("point", [p if p in ALWAYS else pytest.param(p, marks=pytest.mark.slow) for p in POINTS])
def test_a_driver_killed_between_two_shards_is_followed_by_one_that_ends_the_same(tmp_path: Path, point: str) -> None:
    folder = str(tmp_path)
    drive(folder, 10)
    assert killed(folder, ENDS[-1], point)
    for upto in ENDS:  # a shorter range than the one that was begun comes first
        drive(folder, upto)
        assert_cut_is_true(folder)
    assert held(folder) == expected(ENDS[-1])


@pytest.mark.parametrize("end", [50, *(pytest.param(end, marks=pytest.mark.slow) for end in (40, 60))])
def test_rows_that_a_killed_driver_erased_are_missing_from_no_cut_before_the_truncate(tmp_path: Path, end: int) -> None:
    folder = str(tmp_path)
    drive(folder, 10, apart=True)
    assert killed(folder, end, "delta_before_merge", "apart")
    drive(folder, 20, apart=True)
    cut = Lake.open(f"{folder}/{{schema}}/{{table}}").cut()
    assert {shard: table.position for shard, table in cut.tables.items()} == {1: end, 2: 20, 3: 20}
    for upto in ENDS:
        drive(folder, upto, apart=True)
    assert held_apart(folder) == expected(ENDS[-1])


@pytest.mark.parametrize("seed", SEEDS)
def test_ranges_cut_and_left_half_done_at_random_end_in_what_the_source_had(tmp_path: Path, seed: int) -> None:
    """Each driver applies some of the shards, in any order, to some place, and seldom comes to publish."""
    random, folder = Random(seed), str(tmp_path)
    for _ in range(8):
        with driver(folder) as (sink, published):
            upto = stop(published, random.choice([end for end in (10, 30, *ENDS) if end >= published.position]))
            for shard in random.sample(SHARDS, random.randint(0, len(SHARDS))):
                sink.apply(batch(shard, published, upto))
        if random.random() < 0.4:
            drive(folder, upto)
            assert_cut_is_true(folder)
    drive(folder, ENDS[-1])
    assert held(folder) == expected(ENDS[-1])


def assert_cut_is_true(folder: str) -> None:
    """Of the newest published cut."""
    cut = Lake.open(f"{folder}/{{schema}}/{{table}}").cut()
    exact = [shard for shard, table in cut.tables.items() if table.position == cut.position]
    found, wanted = held(folder, cut.versions[f"{folder}/lives"]), expected(cut.position)
    assert {shard: found[shard] for shard in exact} == {shard: wanted[shard] for shard in exact}


@pytest.mark.slow
def test_a_pipeline_killed_between_shards_of_a_source_leaves_each_equal_to_it(pipeline: Pipeline) -> None:
    for shard in ("s1", "s2", "s3"):
        run_sql(
            pipeline.dsn,
            f"CREATE TABLE {shard} (id int PRIMARY KEY, v text)",
            f"INSERT INTO {shard} SELECT i, '{shard}' FROM generate_series(1, 200) i",
        )
    rule = f"{{match: 'public.s*', path: '{pipeline.folder}/lake/all', merge_tables: true}}"
    lake = f"{{type: delta, name: lake, path: '{pipeline.folder}/lake/{{schema}}/{{table}}', rules: [{rule}]}}"
    pipeline.write(tables="public.*", sinks=f"[{lake}]")
    pipeline.reader()
    pipeline.wait_for_copy()
    for number, failpoint in enumerate(["after_table_merge:2", "delta_after_merge:3", "delta_before_merge:2", None]):
        for shard in ("s1", "s2", "s3"):
            run_sql(
                pipeline.dsn,
                f"UPDATE {shard} SET v = v || {number} WHERE id % {number + 2} = 0",
                f"DELETE FROM {shard} WHERE id = {number + 10}",
                f"UPDATE {shard} SET id = id + 1000 WHERE id = {number + 20}",
            )
        pipeline.settle()
        driver = pipeline.apply(failpoint)
        if failpoint is not None:
            assert driver.wait(90) == KILLED, f"{failpoint}\n{pipeline.output()}"
    pipeline.wait(lambda: pipeline.reports(driver), "the driver is up again")
    envelope = pipeline.verify()
    assert envelope["ok"], f"{envelope}\n{pipeline.output()}"
