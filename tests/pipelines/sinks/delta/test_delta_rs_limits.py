"""Limits of delta-rs: which batches and which files of a target fit into the memory of the driver."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sinks.delta.delta_rs_limits import candidates


def files(*bounds: tuple[int | None, int | None, int]) -> pa.Table:
    low, high, size = zip(*bounds, strict=True)
    return pa.table(
        {
            "path": [f"f{n}" for n in range(len(bounds))],
            "size_bytes": pa.array(size, pa.int64()),
            "min.id": pa.array(low, pa.int64()),
            "max.id": pa.array(high, pa.int64()),
        }
    )


FILES = files((0, 99, 1), (100, 199, 10), (150, 300, 100), (None, None, 1000))


@given(st.lists(st.integers(-50, 400), min_size=1))
def test_files_that_may_hold_a_key_are_those_whose_bounds_meet_the_batchs(keys: list[int]) -> None:
    meets = [low is None or (low <= max(keys) and high >= min(keys)) for low, high in
             zip(FILES["min.id"].to_pylist(), FILES["max.id"].to_pylist(), strict=True)]  # fmt: skip
    expected = sum(size for size, met in zip(FILES["size_bytes"].to_pylist(), meets, strict=True) if met)

    assert candidates(FILES, pa.table({"id": pa.array(keys, pa.int64())}), ["id"]) == expected


@pytest.mark.parametrize("source", [pa.table({"id": ["a"]}), pa.table({"id": [b"x"]}), pa.table({"id": [[1]]})])
def test_a_key_that_cannot_be_compared_with_the_bounds_leaves_every_file(source: pa.Table) -> None:
    assert candidates(FILES, source, ["id"]) == 1111


def test_a_target_without_files_has_none_that_may_hold_a_key() -> None:
    assert candidates(FILES.slice(0, 0), pa.table({"id": [1]}), ["id"]) == 0


def test_of_several_key_columns_each_one_rules_files_out() -> None:
    both = FILES.append_column("min.no", pa.array([1, 1, 9, 1])).append_column("max.no", pa.array([5, 5, 9, 5]))
    source = pa.table({"id": [150, 160], "no": [1, 2], "text": ["x", "y"]})

    assert candidates(both, source, ["id", "no", "text"]) == 1010
