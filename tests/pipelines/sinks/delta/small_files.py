"""Many small files in one commit: what upkeep puts together, without a commit for each."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.pipelines.sinks.added_features import commit


def add_small_files(uri: str, row: pa.Table, count: int) -> None:
    """Another client adds so many files: the row, with an `id` from 100 on in each of them."""
    adds, column = [], row.schema.get_field_index("id")
    for number in range(count):
        path = Path(uri, f"small-{number}.parquet")
        pq.write_table(row.set_column(column, row.field("id"), pa.array([100 + number], row.field("id").type)), path)
        add = {"path": path.name, "size": path.stat().st_size, "partitionValues": {}, "modificationTime": 0}
        adds.append({"add": add | {"dataChange": True, "stats": json.dumps({"numRecords": 1})}})
    commit(uri, *adds)
