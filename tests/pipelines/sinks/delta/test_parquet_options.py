"""Which columns of a target's Parquet files get bounds and dictionaries."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.sinks.delta.parquet_options import LONG, parquet_options

ROWS = 100
TABLE = pa.table(
    {
        "unique": pa.array(range(ROWS), pa.int64()),
        "twice": pa.array([number // 2 for number in range(ROWS)], pa.int64()),
        "seldom": pa.array([None, *(f"{number}" for number in range(ROWS - 2)), "1"]),
        "state": pa.array(["paid"] * ROWS),
        "long": pa.array(["x" * (LONG + 1)] * ROWS),
        "float": pa.array([1.0] * ROWS),
        "absent": pa.nulls(ROWS, pa.int32()),
        "list": pa.array([[number] for number in range(ROWS)], pa.list_(pa.int32())),
        "map": pa.array([[("k", number)] for number in range(ROWS)], pa.map_(pa.string(), pa.int64())),
        "struct": pa.array([{"a.b": number, "c": [{"d": 1}]} for number in range(ROWS)]),
    }
)


def test_only_columns_whose_values_repeat_and_nested_ones_get_a_dictionary() -> None:
    written = pa.BufferOutputStream()
    pq.write_table(TABLE, written, **parquet_options(TABLE.schema, TABLE))
    group = pq.ParquetFile(written.getvalue()).metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]

    assert [column.path_in_schema for column in columns if not column.has_dictionary_page] == [
        "unique",
        "seldom",
        "long",
    ]
    assert pq.read_table(pa.BufferReader(written.getvalue())) == TABLE


def test_a_column_that_the_sample_does_not_have_gets_a_dictionary() -> None:
    options = parquet_options(TABLE.schema, TABLE.select(["unique"]))

    assert "unique" not in options["use_dictionary"]
    assert "twice" in options["use_dictionary"]


def test_a_file_has_no_bounds_of_floats_because_they_ignore_nan() -> None:
    assert "float" not in parquet_options(TABLE.schema, TABLE)["write_statistics"]
    assert "unique" in parquet_options(TABLE.schema, TABLE)["write_statistics"]
