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
    chunk = _chunk(path, column, 0)
    return int(chunk.data_page_offset) + int(chunk.total_compressed_size) - 1


def damage_column(path: Path, column: str, group: int = 0) -> None:
    """Overwrite the values of a column in a row group, so that they cannot be decoded."""
    chunk = _chunk(path, column, group)
    with path.open("r+b") as file:
        file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
        file.write(b"\xff" * chunk.total_compressed_size)


def _chunk(path: Path, column: str, group: int) -> pq.ColumnChunkMetaData:
    found = pq.read_metadata(path).row_group(group)
    return next(c for n in range(found.num_columns) if (c := found.column(n)).path_in_schema.startswith(column))
