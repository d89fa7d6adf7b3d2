"""Purge: rewrites data files with many deleted rows, so that reads and storage stay close to the live rows.

A deletion vector only marks rows. A reader still reads their file, and its values stay on disk. A file is rewritten
once a quarter of its rows is deleted. So each deleted row costs three rewritten rows at most, whatever the size of the
table. The caller makes sure that no merge runs; if another client commits at the same time, the purge changes nothing.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cdc.failpoint import hit
from pipelines.sinks.delta.indexed.deletion_vectors import decode, rows_of
from pipelines.sinks.delta.indexed.delta_log import Action, LiveFile, LiveFiles
from pipelines.sinks.delta.indexed.table_storage import TableStorage, plain_schema

DELETED: Final = 4
"""Divisor of the number of rows: a file is rewritten when at least 1/DELETED of its rows is deleted."""
AT_ONCE: Final = 64 << 20
"""Bytes of data files after which one call rewrites no further file. Merges wait for the call."""
_BATCH: Final = 1 << 16
_ROW_GROUP: Final = 1 << 20


def files_to_purge(files: LiveFiles) -> list[LiveFile]:
    """Return the data files that are due, the one with the greatest share of deleted rows first."""
    shares = {
        path: file.vector["cardinality"] / file.rows
        for path, file in files.by_path.items()
        if file.vector is not None and file.rows
    }
    due = [path for path, share in shares.items() if share * DELETED >= 1]
    return [files.by_path[path] for path in sorted(due, key=lambda path: -shares[path])]


def purge(storage: TableStorage, files: LiveFiles, chosen: Sequence[LiveFile], signature: Action) -> bool:
    """Rewrite data files without their deleted rows, in one commit; return False if another client committed first.

    chosen: some of `files_to_purge`; at least one of them is rewritten. signature: fields of the commit info by which
    the sink knows its own commits.
    """
    written, removed, size = list[LiveFile](), list[LiveFile](), 0
    for file in chosen:
        if size and size + file.add["size"] > AT_ONCE:
            break
        size += file.add["size"]
        written.append(_rewrite(storage, file))
        removed.append(file)
    hit("delta_upkeep_purge_written")
    info = {"timestamp": int(time.time() * 1000), "operation": "OPTIMIZE", "operationParameters": {}, **signature}
    actions: list[Action] = [{"commitInfo": info}]
    actions += [file.remove(data_change=False) for file in removed]
    actions += [{"add": file.add} for file in written]
    try:
        files.commit(actions, [*(file.add["path"] for file in removed), *written])
    except FileExistsError:
        return False
    hit("delta_upkeep_purged")
    return True


def _rewrite(storage: TableStorage, file: LiveFile) -> LiveFile:
    if file.vector is None:
        raise ValueError(f"data file {file.path!r} has no deleted rows")
    deleted = decode(file.vector, storage.read)
    path, sink = f"part-00000-{uuid.uuid4()}-c000.snappy.parquet", pa.BufferOutputStream()
    gone, rows, first = rows_of(deleted).astype(np.int64), 0, 0
    with storage.open(file.path) as opened:
        # INT96, which Spark may have written, has years that nanoseconds do not have
        content = pq.ParquetFile(opened, coerce_int96_timestamp_unit="us")
        schema = plain_schema(content.schema_arrow).remove_metadata()
        with pq.ParquetWriter(sink, schema, compression="snappy") as writer:
            for batch in content.iter_batches(batch_size=_BATCH):
                live = _live_rows(batch.cast(schema), gone, first)
                first += batch.num_rows
                writer.write_batch(live, row_group_size=_ROW_GROUP)
                rows += live.num_rows
    written = sink.getvalue()
    storage.write(path, written)
    changed = {
        "path": path,
        "size": written.size,
        "modificationTime": int(time.time() * 1000),
        "dataChange": False,
        "stats": json.dumps(_stats_of(file, rows), ensure_ascii=False),
    }
    return LiveFile({name: value for name, value in file.add.items() if name != "deletionVector"} | changed)


def _live_rows(batch: pa.RecordBatch, deleted: np.ndarray, first: int) -> pa.RecordBatch:
    """Return the rows of a batch that are not deleted. first: number of its first row in the data file."""
    live = np.ones(batch.num_rows, bool)
    begin, end = np.searchsorted(deleted, [first, first + batch.num_rows])
    live[deleted[begin:end] - first] = False
    return batch.filter(pa.array(live))


def _stats_of(file: LiveFile, rows: int) -> dict[str, Any]:
    """Return the statistics of the rewritten file: the bounds of the old one, which may be wider than needed.

    The number of nulls is known only if all values were null, or none.
    """
    nulls = file.stats.get("nullCount", {})
    known = {name: rows if count else 0 for name, count in nulls.items() if count in {0, file.rows}}
    return file.stats | {"numRecords": rows, "nullCount": known, "tightBounds": False}
