"""Limits of delta-rs: whether a merge fits into the memory of the driver.

delta-rs merges on the driver, with several copies of the batch in memory, and rewrites the files that may contain a key
of the batch. Spark merges what does not fit. This module reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.sinks.delta.delta_target import DeltaTarget

MAX_BATCH_BYTES: Final = 64 << 20
"""Maximum size, in bytes of Arrow rows, of a batch that delta-rs merges; it needs about six times as much memory."""
MAX_CANDIDATE_BYTES: Final = 512 << 20
"""Maximum bytes of target files that a merge by delta-rs may read, because its memory grows with them."""


def fits(target: DeltaTarget, source: pa.Table, key: Sequence[str]) -> bool:
    """Return whether delta-rs can merge a batch; key: the key columns; empty: the rows are only appended."""
    if source.nbytes > MAX_BATCH_BYTES:
        return False
    if not key or target.files()[1] <= MAX_CANDIDATE_BYTES:
        return True
    return candidates(target.actions, source, key) <= MAX_CANDIDATE_BYTES


def candidates(files: pa.Table, source: pa.Table, key: Sequence[str]) -> int:
    """Return the total bytes of the target files that may contain a key of the source rows.

    files: the live files, with `size_bytes` and the columns `min.<name>` and `max.<name>` for each key column. A file
    without these bounds may contain any key.
    """
    may = pa.array([True] * files.num_rows, pa.bool_())
    for name in key:
        if f"min.{name}" not in files.column_names or f"max.{name}" not in files.column_names:
            continue
        try:
            found = pc.min_max(source[name])
            meets = pc.and_(
                pc.less_equal(files[f"min.{name}"], found["max"]), pc.greater_equal(files[f"max.{name}"], found["min"])
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            continue  # bounds in another type than the column's
        may = pc.and_(may, pc.fill_null(meets, fill_value=True))
    return pc.sum(files["size_bytes"].filter(may)).as_py() or 0
