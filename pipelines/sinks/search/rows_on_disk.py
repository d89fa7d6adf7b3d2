"""Rows on disk: keeps the rows of a large batch in a file instead of in memory, until they are published."""

from __future__ import annotations

from collections.abc import Iterable
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile

import pyarrow as pa


def on_disk(parts: Iterable[pa.Table], folder: Path) -> pa.Table | None:
    """Write tables of one schema to a file in a folder, and return them as one table; None if there are none.

    The kernel reads pages of the table when they are used, and takes their memory back when it needs it. The file has
    no name, so it disappears with the table, and also after a crash.
    """
    with TemporaryFile(dir=folder) as file:
        writer: pa.RecordBatchFileWriter | None = None
        for part in parts:
            if writer is None:
                writer = pa.ipc.new_file(file, part.schema)
            writer.write_table(part)
        if writer is None:
            return None
        writer.close()
        file.flush()
        return pa.ipc.open_file(pa.py_buffer(mmap(file.fileno(), 0, access=ACCESS_READ))).read_all()
