"""Actions of commits: delta-rs reads a commit of our own as it reads one that it wrote."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from cdc.delta_protocol.actions import add_action, commit_info, encode_commit, remove_action, txn_action
from cdc.delta_protocol.commits import commit_file

STATISTICS = json.dumps({"numRecords": 2, "minValues": {"n": 1}, "maxValues": {"n": 2}, "nullCount": {"n": 0}})


def test_delta_rs_reads_added_and_removed_files_transactions_and_metadata(tmp_path: Path) -> None:
    rows = pa.table({"n": [1, 2]})
    DeltaTable.create(str(tmp_path), rows.schema)
    pq.write_table(rows, tmp_path / "one.parquet")
    size = (tmp_path / "one.parquet").stat().st_size
    added = [
        commit_info("WRITE", **{"cdc.last": "0/ü"}),
        txn_action("app", 7),
        {"add": add_action("one.parquet", size, STATISTICS)},
    ]
    commit_file(tmp_path, 1).write_bytes(encode_commit(added))
    table = DeltaTable(str(tmp_path))

    assert table.to_pyarrow_table() == rows
    assert (table.transaction_version("app"), table.history(1)[0]["cdc.last"]) == (7, "0/ü")
    (file,) = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    assert (file["num_records"], file["min.n"], file["max.n"], file["size_bytes"]) == (2, 1, 2, size)

    commit_file(tmp_path, 2).write_bytes(
        encode_commit([commit_info("DELETE"), {"remove": remove_action("one.parquet", size)}])
    )
    table.update_incremental()

    assert table.to_pyarrow_table().num_rows == 0


def test_a_version_of_numpy_becomes_json_and_the_time_is_in_milliseconds() -> None:
    before = time.time() * 1000
    action = json.loads(encode_commit([txn_action("app", cast("int", np.int64(7)))]))["txn"]

    assert (action["appId"], action["version"]) == ("app", 7)
    assert before - 1 <= action["lastUpdated"] <= time.time() * 1000
