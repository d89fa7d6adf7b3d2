"""Statistics have bounds that include every value, if they can be exact. Columns get a dictionary if values repeat."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from hashlib import sha256
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sinks.delta.new_data_files import (
    FEW_ROWS,
    LONG,
    MAX_TEXT_BOUND,
    parquet_options,
    statistics,
)

ROWS = pa.table(
    {
        "id": pa.array([3, 1, 2], pa.int64()),
        "name": ["b", "ü", None],
        "made": pa.array([datetime(2026, 1, 2, 3, 4, 5, 678_901, UTC), None, None], pa.timestamp("us", tz="UTC")),
        "day": pa.array([date(2026, 1, 31), date(1, 1, 1), None], pa.date32()),
        "price": pa.array([Decimal("1.50"), None, None], pa.decimal128(12, 2)),
        "active": [True, None, False],
        "empty": pa.nulls(3, pa.string()),
    }
)
COUNT = 100
SAMPLED = pa.table(
    {
        "unique": pa.array(range(COUNT), pa.int64()),
        "twice": pa.array([number // 2 for number in range(COUNT)], pa.int64()),
        "seldom": pa.array([None, *(f"{number}" for number in range(COUNT - 2)), "1"]),
        "state": pa.array(["paid"] * COUNT),
        "long": pa.array(["x" * (LONG + 1)] * COUNT),
        "float": pa.array([1.0] * COUNT),
        "encoded": pa.array([f"{number}" for number in range(COUNT)]).dictionary_encode(),
        "absent": pa.nulls(COUNT, pa.int32()),
        "list": pa.array([[number] for number in range(COUNT)], pa.list_(pa.int32())),
        "map": pa.array([[("k", number)] for number in range(COUNT)], pa.map_(pa.string(), pa.int64())),
        "struct": pa.array([{"a.b": number, "c": [{"d": 1}]} for number in range(COUNT)]),
    }
)


def parsed_statistics(rows: pa.Table, *columns: str) -> Any:
    return json.loads(statistics(rows, columns))


def test_bounds_and_nulls_are_written_as_delta_spells_them() -> None:
    found = parsed_statistics(ROWS, "id", "name", "made", "day")
    assert found["numRecords"] == 3
    assert found["minValues"] == {"id": 1, "name": "b", "made": "2026-01-02T03:04:05.678Z", "day": "0001-01-01"}
    assert found["maxValues"] == {"id": 3, "name": "ü", "made": "2026-01-02T03:04:05.678Z", "day": "2026-01-31"}
    assert found["nullCount"] == {"id": 0, "name": 1, "made": 2, "day": 1}


def test_a_type_without_an_exact_spelling_has_no_bounds_but_its_nulls() -> None:
    found = parsed_statistics(ROWS, "price", "active", "empty")
    assert (found["minValues"], found["maxValues"]) == ({}, {})
    assert found["nullCount"] == {"price": 2, "active": 1, "empty": 3}


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_a_moment_before_1970_is_never_before_its_bound(zone: str | None) -> None:
    moments = pa.array([-1, -1_500, -62_135_596_799_999_999], pa.timestamp("us", tz=zone))
    for moment in moments:
        least = parsed_statistics(pa.table({"made": pa.array([moment.as_py()], moments.type)}), "made")["minValues"][
            "made"
        ]
        assert pa.array([least.removesuffix("Z").replace("T", " ")]).cast(pa.timestamp("us"))[0].value <= moment.value


def test_nothing_is_said_of_columns_that_were_not_asked_for_or_are_not_there() -> None:
    assert parsed_statistics(ROWS, "id", "other")["nullCount"] == {"id": 0}


def test_a_long_text_is_never_outside_of_its_bounds() -> None:
    long = "x" * (MAX_TEXT_BOUND + 1)
    found = parsed_statistics(pa.table({"note": [long]}), "note")
    assert found["minValues"] == {"note": long[:MAX_TEXT_BOUND]}
    assert found["maxValues"] == {}


def test_only_columns_whose_values_repeat_and_nested_ones_get_a_dictionary() -> None:
    written = pa.BufferOutputStream()
    pq.write_table(SAMPLED, written, **parquet_options(SAMPLED.schema, SAMPLED))
    group = pq.ParquetFile(written.getvalue()).metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]

    assert [column.path_in_schema for column in columns if not column.has_dictionary_page] == [
        "unique",
        "seldom",
        "long",
    ]
    assert pq.read_table(pa.BufferReader(written.getvalue())) == SAMPLED


def test_a_column_that_the_sample_does_not_have_gets_a_dictionary() -> None:
    options = parquet_options(SAMPLED.schema, SAMPLED.select(["unique"]))

    assert "unique" not in options["use_dictionary"]
    assert "twice" in options["use_dictionary"]


def test_a_file_with_few_rows_gets_no_dictionary() -> None:
    assert parquet_options(SAMPLED.schema, SAMPLED.slice(0, FEW_ROWS))["use_dictionary"] == []
    assert parquet_options(SAMPLED.schema, SAMPLED.slice(0, FEW_ROWS + 1))["use_dictionary"] != []


def compressions(rows: pa.Table) -> dict[str, str]:
    written = pa.BufferOutputStream()
    pq.write_table(rows, written, **parquet_options(rows.schema, rows))
    file = pq.ParquetFile(written.getvalue())
    assert file.read() == rows
    group = file.metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    return {column.path_in_schema: column.compression for column in columns}


def test_only_texts_and_bytes_that_hardly_become_smaller_are_not_compressed() -> None:
    digests = [sha256(str(number).encode()) for number in range(COUNT)]
    rows = pa.table(
        {
            "digest": [digest.hexdigest() for digest in digests],
            "bytes": [digest.digest() for digest in digests],
            "sentence": [f"order {number} was paid" for number in range(COUNT)],
            "number": range(COUNT),
            "empty": [""] * COUNT,
            "null": pa.nulls(COUNT, pa.string()),
            "list": [[digest.hexdigest()] for digest in digests],
        }
    )
    assert [name for name, codec in compressions(rows).items() if codec == "UNCOMPRESSED"] == ["digest", "bytes"]
    assert compressions(rows.slice(1)) == compressions(rows)
    assert set(compressions(rows.slice(0, FEW_ROWS)).values()) == {"SNAPPY"}


NUMBERS = st.lists(st.none() | st.integers(-(1 << 63), (1 << 63) - 1), max_size=5)
TEXTS = st.lists(st.none() | st.text(st.characters(codec="utf-8"), max_size=3), max_size=5)


@given(NUMBERS, TEXTS)
def test_few_rows_have_the_bounds_of_many(numbers: list[int | None], texts: list[str | None]) -> None:
    for values, kind in ((numbers, pa.int64()), (texts, pa.string())):
        few = pa.table({"value": pa.array(values, kind)})
        many = pa.concat_tables([few] * (FEW_ROWS + 1))
        found, expected = parsed_statistics(few, "value"), parsed_statistics(many, "value")
        assert found["minValues"] == expected["minValues"]
        assert found["maxValues"] == expected["maxValues"]


def test_a_file_has_no_bounds_of_floats_because_they_ignore_nan() -> None:
    assert "float" not in parquet_options(SAMPLED.schema, SAMPLED)["write_statistics"]
    assert "unique" in parquet_options(SAMPLED.schema, SAMPLED)["write_statistics"]
