"""Rows of one version of a target, by the values of a column."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.table_version import RowsNotReadable, TableVersion
from tests.contracts.folded import batch, gone, put


@pytest.fixture(name="versions")
def _versions(tmp_path: Path) -> tuple[TableVersion, TableVersion]:
    """The target before and after an update and a delete."""
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}"))
    sink.open("log-1")
    rows = [put(number, f"it's {number % 3}", 10) for number in range(2_000)]
    first = sink.apply(batch(rows, 0, 20, generation=1))
    second = sink.apply(batch([put(7, "new", 30), gone(8, 30)], 20, 40))
    assert first.version is not None
    assert second.version is not None
    return tuple(TableVersion(one.target, one.version or 0, one.relation) for one in (first, second))  # type: ignore[return-value]


def found(version: TableVersion, column: str, *values: object) -> list[int]:
    return sorted(version.rows(column, pa.array(values))["id"].to_pylist())


def test_each_version_has_the_rows_of_its_time(versions: tuple[TableVersion, TableVersion]) -> None:
    before, after = versions
    assert found(before, "id", 7, 8, 9, 9_999) == [7, 8, 9]
    assert found(after, "id", 7, 8, 9) == [7, 9]
    assert (found(before, "item", "new"), found(after, "item", "new")) == ([], [7])
    assert len(found(before, "item", "it's 1", None)) == len(range(1, 2_000, 3))


def test_many_values_are_found_among_the_rows_of_their_range(versions: tuple[TableVersion, TableVersion]) -> None:
    assert found(versions[0], "id", *range(0, 4_000, 2)) == list(range(0, 2_000, 2))


def test_no_value_finds_no_row(versions: tuple[TableVersion, TableVersion]) -> None:
    assert versions[0].rows("id", pa.array([None], pa.int64())).num_rows == 0


def test_both_zeros_of_a_float_are_one_value(tmp_path: Path) -> None:
    uri = str(tmp_path / "floats")
    write_deltalake(uri, pa.table({"f": [-0.0, 0.0, 1.0, None], "_position": [1, 2, 3, 4], "_ordinal": [0, 0, 0, 0]}))
    assert TableVersion(uri, 0, 1).rows("f", pa.array([0.0]))["_position"].to_pylist() == [1, 2]


def test_what_cannot_be_read_is_left_to_spark(versions: tuple[TableVersion, TableVersion], tmp_path: Path) -> None:
    with pytest.raises(RowsNotReadable):
        versions[0].rows("id", pa.array(["x"]))
    with pytest.raises(RowsNotReadable):
        TableVersion(str(tmp_path / "absent"), 0, 1)
