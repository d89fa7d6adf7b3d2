"""Workloads: the keys that a constant load changes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.benchmarks.peers import prepare
from tests.benchmarks.workloads import Workload, random_keys, tpcb
from tests.fixtures.postgres import rows_of

ROWS = 2_000
DISTANCES_OF_A_STRIDE = 3
"""The multiples of a stride, modulo the number of keys, have three different distances at most."""


@pytest.mark.parametrize(
    ("workload", "changes"), [(random_keys(ROWS), 400), (tpcb(0, ROWS), 100)], ids=["random_keys", "tpcb"]
)
def test_a_constant_load_changes_random_rows_of_the_large_table(database: str, workload: Workload, changes: int):
    prepare(database, *workload.setup, f"CALL {workload.schema}.paced(100, 10000)")

    changed = f"SELECT aid, abalance FROM {workload.schema}.accounts WHERE abalance > 0 ORDER BY aid"
    rows = rows_of(database, changed)
    keys = [key for key, _ in rows]
    assert sum(count for _, count in rows) == changes
    assert {key * 10 // (ROWS + 1) for key in keys} == set(range(10))
    assert len({later - key for key, later in pairwise(keys)}) > DISTANCES_OF_A_STRIDE
