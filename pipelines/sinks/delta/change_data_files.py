"""Change data files: what readers of Delta's change data feed get from a commit that replaces or deletes rows.

A table with the property `delta.enableChangeDataFeed` promises its readers every changed row: old and new image of an
update, and each inserted or deleted row. Readers conclude that from the data files of a commit that only adds rows. For
any other commit they read the files of its `cdc` actions, which have all of these rows, and nothing else.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cdc.delta_protocol.actions import Action
from cdc.delta_protocol.table_storage import TableStorage
from pipelines.sinks.delta.new_data_files import SMALL_SAMPLE_ROWS, parquet_options
from pipelines.sinks.delta.target_layout import rows_by_partition

CHANGE_DATA_FEED: Final = "delta.enableChangeDataFeed"
"""Property of a Delta table: `true` if its commits have change data files."""
FOLDER: Final = "_change_data"
"""Folder of the change data files in the table's directory, as the Delta protocol names it."""
TYPE: Final = "_change_type"
"""Column of the change data files with the kind of change, as the Delta protocol names it."""


def changed_rows(old: pa.Table, stays: np.ndarray, new: pa.Table, replaces: np.ndarray) -> pa.Table:
    """Return the rows of change data files.

    old: the rows that leave the table. stays: whether a new row has the key of the old row. new: the rows that come.
    replaces: whether the new row has the key of an old row. Both tables have all columns of the target.
    """
    kinds = [
        np.where(stays, "update_preimage", "delete"),
        np.where(replaces, "update_postimage", "insert"),
    ]
    parts = [
        rows.replace_schema_metadata(None).append_column(TYPE, pa.array(kind.tolist(), pa.string()))
        for rows, kind in zip((old, new), kinds, strict=True)
    ]
    return pa.concat_tables([parts[0], parts[1].cast(parts[0].schema)])


def write_change_data(storage: TableStorage, rows: pa.Table, partition_columns: Sequence[str]) -> list[Action]:
    """Write rows of `changed_rows` to one file per partition; return the `cdc` actions of the files."""
    actions = list[Action]()
    for values, numbers in rows_by_partition(rows, partition_columns):
        part = rows if numbers is None else rows.take(pa.array(numbers))
        content = part.drop_columns(list(values))
        path, sink = f"{FOLDER}/cdc-00000-{uuid.uuid4()}.c000.snappy.parquet", pa.BufferOutputStream()
        pq.write_table(content, sink, **parquet_options(content.schema, content.slice(0, SMALL_SAMPLE_ROWS)))
        written = sink.getvalue()
        storage.write(path, written)
        file = {"path": path, "partitionValues": values, "size": written.size, "dataChange": False}
        actions.append({"cdc": file})
    return actions
