"""kill -9 while shards of one target are written one after the other: the next driver leaves each of them exact."""

from __future__ import annotations

import signal
from pathlib import Path
from random import Random

import pytest

from cdc.failpoint import VARIABLE
from cdc.stores.lake import Lake
from tests.faults.history_driver import ENDS
from tests.faults.merged_driver import SHARDS, driver, expected, held, main, one
from tests.fixtures import forked

KILLED = -signal.SIGKILL
POINTS = [
    *(f"delta_{side}_merge:{nth}" for nth in (1, 2, 3) for side in ("before", "after")),
    "delta_before_columns",
    "delta_after_columns",
    "delta_before_publish",
]
ALWAYS = {"delta_after_merge:2", "delta_after_columns"}
SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 60))]


def drive(folder: Path, upto: int, failpoint: str | None = None) -> int:
    environment = {VARIABLE: failpoint} if failpoint else {}
    return forked.run("tests.faults.merged_driver", folder, upto, environment=environment).status


@pytest.mark.parametrize("point", [p if p in ALWAYS else pytest.param(p, marks=pytest.mark.slow) for p in POINTS])
def test_a_driver_killed_between_two_shards_is_followed_by_one_that_ends_the_same(tmp_path: Path, point: str) -> None:
    assert drive(tmp_path, 10) == 0
    assert drive(tmp_path, ENDS[-1], point) == KILLED
    for upto in ENDS:  # a shorter range than the one that was begun comes first
        assert drive(tmp_path, upto) == 0
    assert held(str(tmp_path)) == expected(ENDS[-1])


@pytest.mark.parametrize("seed", SEEDS)
def test_ranges_cut_and_left_half_done_at_random_end_in_what_the_source_had(tmp_path: Path, seed: int) -> None:
    """Each driver applies some of the shards, in any order, to some place, and seldom comes to publish."""
    random, folder = Random(seed), str(tmp_path)
    for _ in range(8):
        with driver(folder) as (sink, published):
            upto = random.choice([end for end in (10, 30, *ENDS) if end >= published.position])
            for shard in random.sample(SHARDS, random.randint(0, len(SHARDS))):
                one(sink, published, shard, upto)
        if random.random() < 0.4:
            main(folder, upto)
            assert_cut_is_true(folder)
    main(folder, ENDS[-1])
    assert held(folder) == expected(ENDS[-1])


def assert_cut_is_true(folder: str) -> None:
    """Of the newest published cut."""
    cut = Lake.open(f"{folder}/{{schema}}/{{table}}").cut()
    exact = [shard for shard, table in cut.tables.items() if table.position == cut.position]
    found, wanted = held(folder, cut.versions[f"{folder}/lives"]), expected(cut.position)
    assert {shard: found[shard] for shard in exact} == {shard: wanted[shard] for shard in exact}
