"""Damage to data files of a log: a flipped byte, anywhere or in the values of a column."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq


def flip_byte(path: Path, at: int, by: int = 0x10) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= by
    path.write_bytes(content)


def page_of(path: Path, column: str) -> int:
    """Somewhere inside the values of the first page of a column."""
    group = pq.read_metadata(path).row_group(0)
    chunk = next(c for n in range(group.num_columns) if (c := group.column(n)).path_in_schema.startswith(column))
    return int(chunk.data_page_offset) + int(chunk.total_compressed_size) - 1
