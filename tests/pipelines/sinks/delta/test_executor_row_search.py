"""The search of equal rows by executors: hashes of rows, and the rows of a data file that are not deleted."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from cdc.delta_protocol.deletion_vectors import encode
from cdc.delta_protocol.table_storage import storage_of
from pipelines.folding.keyless_fold import row_ids
from pipelines.sinks.delta.executor_row_search import StoredFile, hash_rows

KINDS: dict[pa.DataType, list[Any]] = {
    pa.float64(): [0.0, -0.0, float("nan"), 1.5],
    pa.float32(): [0.0, -0.0, float("nan"), 1.5],
    pa.string(): ["", "0", "a", "a\0b"],
    pa.binary(): [b"", b"\0", b"a"],
    pa.int32(): [0, -1, 1],
    pa.bool_(): [True, False],
    pa.date32(): [date(1970, 1, 1), date(2024, 2, 29)],
    pa.decimal128(10, 2): [Decimal("0.00"), Decimal("-1.50")],
    pa.timestamp("us", "UTC"): [0, -1],
    pa.list_(pa.int32()): [[], [1], [None], [1, 1]],
}


@given(st.data())
def test_rows_have_the_same_hash_if_and_only_if_they_are_equal(drawn: st.DataObject) -> None:
    kinds = drawn.draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3))
    rows = drawn.draw(st.lists(st.tuples(*(st.sampled_from([None, *KINDS[kind]]) for kind in kinds)), min_size=1))
    columns = [pa.array([row[n] for row in rows], kind) for n, kind in enumerate(kinds)]
    ids = row_ids(columns, len(rows)).tolist()
    hashes = hash_rows([pa.chunked_array([column]) for column in columns], len(rows), bytes(range(16)))
    both = list(zip(hashes.high.tolist(), hashes.low.tolist(), strict=True))
    assert len({*both}) == len({*ids}) == len({*zip(both, ids, strict=True)})


def test_a_file_yields_rows_that_are_not_deleted_with_its_partition_and_newer_columns(tmp_path: Path) -> None:
    (tmp_path / "_vectors").mkdir()
    pq.write_table(pa.table({"id": range(6)}), tmp_path / "any.parquet", row_group_size=2)
    path, content, (vector,) = encode([BitMap([0, 3])])
    storage_of(str(tmp_path)).write(path, content)
    file = StoredFile("any.parquet", vector, (("day", "1970-01-01"),))
    columns = pa.schema([("id", pa.int64()), ("day", pa.date32()), ("newer", pa.int32())])
    rows = pa.Table.from_batches(file.live_rows(storage_of(str(tmp_path)), columns)).to_pylist()
    assert rows == [{"id": n, "day": "1970-01-01", "newer": None} for n in (1, 2, 4, 5)]
