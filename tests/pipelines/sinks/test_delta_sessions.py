"""Two sinks of one process that let one Spark session write at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deltalake import DeltaTable

from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import batch, put

LOG = "log-1"


def filled(spark, folder: Path, name: str, ends: list[int]) -> list[int | None]:
    """Where a target stands by its own word after each of its batches."""
    sink = DeltaSink(DeltaSettings(name, f"{folder}/{name}/{{schema}}/{{table}}", Writer.SPARK), spark)
    sink.open(LOG)
    stands = []
    for after, upto in zip([0, *ends], ends, strict=False):
        record = sink.apply(batch([put(1, name, upto)], after, upto))
        table = DeltaTable(record.target)
        identity = table.metadata().configuration["cdc.app_id"]
        stands.append(table.transaction_version(identity))
    return stands


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_each_commit_carries_the_position_of_its_own_sink(spark, tmp_path: Path) -> None:
    ends = {"near": [10, 20, 30, 40], "far": [1_010, 1_020, 1_030, 1_040]}
    with ThreadPoolExecutor(2) as pool:
        found = {name: pool.submit(filled, spark, tmp_path, name, said) for name, said in ends.items()}

    assert {name: stands.result() for name, stands in found.items()} == ends
