"""History both ways: applied on the driver or by executors, a target keeps the same history in each mode."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tests.pipelines.cold_log import log_writer
from tests.pipelines.test_both_ways import (
    ManyKeys,
    appended_batches,
    loop_in,
    parked_in,
    random_log,
    records_of,
    rows_of,
)

pytestmark = pytest.mark.usefixtures("with_delta")
EXAMPLES = int(os.environ.get("CDC_HISTORY_BOTH_WAYS_EXAMPLES", "1"))
"""Random logs that are applied both ways; 500 are the proof, and take hours."""
RULES = """[
  {match: shop.table1, stored_as_scd_type: 2, transform: {mask: {large: "keep_last:1"}, rename: {more: other}}},
  {match: shop.table2, mode: append, transform: {drop: [large]}},
  {match: shop.table3, mode: soft_delete},
]"""
"""Every mode that keeps history, and rules that executors apply as the driver does."""
MODES = 3
UNFIT = 0.01


class FewUnfit(ManyKeys):
    """Few values that do not fit: a partial image that moves a parked row stops its table."""

    unfit = UNFIT


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_both_ways_keep_the_same_history_positions_and_dead_letters(spark: SparkSession, seed: int) -> None:
    random = Random(seed)
    with TemporaryDirectory() as root:
        folder, log = Path(root), Path(root, "log")
        writer, waiting = log_writer(log), random_log(random, MODES, FewUnfit)
        with (
            loop_in(folder / "here", log, None, rules=RULES) as here,
            loop_in(folder / "spark", log, spark, rules=RULES) as there,
        ):
            for end in appended_batches(random, writer, waiting):
                here(None, end)
                there(spark, end)
                assert rows_of(there) == rows_of(here)
                assert parked_in(there) == parked_in(here)
                assert records_of(there) == records_of(here)
