"""Files of the indexed writer: which row groups are read, and which statistics they have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import WriterProperties, write_deltalake

from tests.pipelines.sinks.delta.vector_tables import COLUMNS, VectorTable, columns_of, upsert


def test_of_a_long_file_only_the_row_groups_with_wanted_rows_are_read(tmp_path: Path) -> None:
    table, count = VectorTable(str(tmp_path / "table")), 1_000
    rows = pa.table(
        [np.arange(count), pa.array(map(str, range(count))), np.ones(count, np.int64), np.arange(count)], COLUMNS
    )
    write_deltalake(table.uri, rows, mode="append", writer_properties=WriterProperties(max_row_group_size=100))
    table.reopen()
    (file,) = table.files().by_path.values()
    for numbers in ([0], [999], [99, 100], [950, 5, 950, 500], [*range(1_000)], []):
        read = table.table.files.read_rows(file, ("item", "missing"), np.array(numbers, np.int64))
        assert read["item"].to_pylist() == [str(number) for number in numbers]
        assert read["missing"].null_count == len(numbers)


def test_files_have_no_bounds_of_floats(tmp_path: Path) -> None:
    """Parquet bounds ignore NaN, which Spark sorts above all values."""
    table = VectorTable(str(tmp_path / "table"), columns_of(("id", pa.int64()), ("price", pa.float64())))
    table.merge(upsert(1, id=1, price=float("nan")), upsert(1, 1, id=2, price=1.0))
    table.merge(upsert(2, id=3, price=2.0))
    table.table.read_commits()
    described = table.columns.names
    done = table.table.rewrite(list(table.table.files.by_path.values()), described, described, lambda _: None)
    assert table.table.commit_rewrite(done, {})
    for path in Path(table.uri).glob("*.parquet"):
        group = pq.ParquetFile(path).metadata.row_group(0)
        kept = {group.column(number).path_in_schema: group.column(number).statistics for number in range(4)}
        assert (kept["price"], kept["id"] is None) == (None, False)
