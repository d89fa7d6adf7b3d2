"""Leftovers: data files that a writer staged for a transaction and did not live to commit."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

from cdc.log.layout import CHANGES


def remove_leftovers(root: Path) -> int:
    """Remove them from the log under root; how many bytes that gave back. For the one writer, before it stages.

    Nothing is committed between staging and the commit that takes the staged files, so they are younger than the
    latest commit. A file that the log has taken and let go again is older, and stays for who still reads it.
    """
    changes = root / CHANGES
    table = DeltaTable(str(changes))
    committed = int(table.history(1)[0]["timestamp"]) * 1_000_000
    held = {str(changes / path) for path in pa.table(table.get_add_actions(flatten=True))["path"].to_pylist()}
    given = 0
    for file in changes.glob("segment=*/*.parquet"):
        found = file.stat()
        if str(file) not in held and found.st_mtime_ns > committed:
            file.unlink()
            given += found.st_size
    return given
