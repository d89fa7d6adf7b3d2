"""Rows of a copied table that another process encoded as a Parquet file, and their place in the log.

An executor reads and encodes rows before anybody knows at which position they will be. Of the columns of a log row only
four depend on it: position, ordinal, xid and commit time. They are the first columns, so in each row group their bytes
come first. `PlacedChunk.encode` writes these four columns, and copies the bytes of the other columns. So the writer of
the log neither decodes nor encodes a row, and the result is a file as if the writer had encoded all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from cdc.errors import LogCorrupt
from cdc.log.disk_format import PARQUET, delta_statistics
from cdc.log.thrift_compact import Field, Struct, ThriftList, decode_struct, encode_struct
from cdc.log.writer import EncodedFile
from cdc.log_row import LOG_SCHEMA, Operation, RowOrder

PLACE_COLUMNS: Final = ("position", "ordinal", "xid", "committed_at")
"""Columns of a log row that depend on its place in the log; the first columns of LOG_SCHEMA."""
_PLACE_SCHEMA: Final = pa.schema([LOG_SCHEMA.field(name) for name in PLACE_COLUMNS])
_MAGIC: Final = b"PAR1"
_END: Final = 8
"""Number of bytes at the end of a Parquet file that contain the length of the footer and _MAGIC."""

_I64: Final = 6
"""Type of a 64-bit integer in Thrift's compact protocol."""
_STRUCT: Final = 12

# field ids of parquet.thrift
_FILE_ROWS: Final = 3
_FILE_GROUPS: Final = 4
_GROUP_COLUMNS: Final = 1
_GROUP_BYTES: Final = 2
_GROUP_OFFSET: Final = 5
_GROUP_COMPRESSED: Final = 6
_GROUP_NUMBER: Final = 7
_COLUMN_OFFSET: Final = 2
_COLUMN_METADATA: Final = 3
_PATH: Final = 3
_UNCOMPRESSED: Final = 6
_COMPRESSED: Final = 7
_PAGE_OFFSETS: Final = (9, 10, 11)
"""Fields of the metadata of a column chunk with offsets of its pages: data, index and dictionary."""
_ONE_GROUP: Final = 1 << 30
"""A number of rows that no row group reaches."""


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """Rows of LOG_SCHEMA of one relation, without their place in the log, in a Parquet file with the log's options."""

    content: bytes
    group_rows: tuple[int, ...]
    """Number of rows of each row group."""
    relation: int
    footer: Struct = field(repr=False)
    """Description of the file, by field ids of parquet.thrift."""
    _file: pq.ParquetFile = field(repr=False)

    @classmethod
    def parse(cls, content: bytes, relation: int) -> EncodedChunk:
        """Return the chunk of a file's content.

        Raises LogCorrupt if the content is no file of log rows, or has another layout than the log's writer uses.
        """
        try:
            file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
        except pa.ArrowException as exc:
            raise LogCorrupt("a copied file is not a Parquet file") from exc
        if not file.schema_arrow.equals(LOG_SCHEMA):
            raise LogCorrupt("a copied file does not have the columns of a log row")
        footer = _footer(content)
        for group in footer[_FILE_GROUPS].value.values:
            _extent(group[_GROUP_COLUMNS].value.values)
        groups = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        return cls(content, tuple(groups), relation, footer, file)

    @property
    def rows(self) -> int:
        """Number of rows of all row groups."""
        return sum(self.group_rows)

    def group_keys(self) -> Iterator[pa.ChunkedArray]:
        """Yield the column `key` of each row group."""
        for number in range(len(self.group_rows)):
            yield self._file.read_row_group(number, columns=["key"], use_threads=False)["key"]

    def table(self, groups: Sequence[int]) -> pa.Table:
        """Return the rows of the given row groups, in LOG_SCHEMA."""
        if not groups:
            return LOG_SCHEMA.empty_table()
        return self._file.read_row_groups(list(groups), use_threads=False).cast(LOG_SCHEMA)


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """Row groups of an encoded chunk, with their place in the log; the log writer writes them as one data file."""

    chunk: EncodedChunk
    groups: tuple[int, ...]
    """Numbers of the row groups; at least one."""
    first: RowOrder
    """Place of the first row; the others have consecutive ordinals."""

    @property
    def rows(self) -> int:
        """Number of rows of the row groups."""
        return sum(self.chunk.group_rows[number] for number in self.groups)

    @property
    def nbytes(self) -> int:
        """Size in memory in bytes."""
        return len(self.chunk.content)

    def encode(self) -> EncodedFile:
        """Return the data file."""
        places, source, footer = self._place_columns(), self.chunk.content, dict(self.chunk.footer)
        narrow = _encode_groups(places, [self.chunk.group_rows[number] for number in self.groups])
        narrow_groups = _footer(narrow)[_FILE_GROUPS].value.values
        groups = footer[_FILE_GROUPS].value.values
        pieces: list[Any] = [_MAGIC]
        offset, kept = len(_MAGIC), list[Struct]()
        for number, placed in zip(self.groups, narrow_groups, strict=True):
            group, parts = _merged_group(groups[number], placed, offset)
            if _GROUP_NUMBER in group:
                group[_GROUP_NUMBER] = Field(group[_GROUP_NUMBER].kind, len(kept))
            kept.append(group)
            for content, (start, size) in zip((narrow, source), parts, strict=True):
                pieces.append(memoryview(content)[start : start + size])
                offset += size
        footer[_FILE_ROWS] = Field(footer[_FILE_ROWS].kind, self.rows)
        footer[_FILE_GROUPS] = Field(footer[_FILE_GROUPS].kind, ThriftList(_STRUCT, kept))
        described = encode_struct(footer)
        pieces += [described, len(described).to_bytes(4, "little"), _MAGIC]
        return EncodedFile(memoryview(b"".join(pieces)), self.rows, self._statistics(places))

    def _place_columns(self) -> pa.Table:
        count, first = self.rows, self.first
        columns = {
            "position": pa.repeat(pa.scalar(first.position, pa.int64()), count),
            "ordinal": pa.arange(first.ordinal, first.ordinal + count),
            "xid": pa.repeat(pa.scalar(first.xid, pa.int64()), count),
            "committed_at": pa.repeat(pa.scalar(first.committed_at, _PLACE_SCHEMA.field("committed_at").type), count),
        }
        return pa.table(columns, schema=_PLACE_SCHEMA)

    def _statistics(self, places: pa.Table) -> str:
        count = places.num_rows
        rows = places.append_column("relation", pa.repeat(pa.scalar(self.chunk.relation, pa.int64()), count))
        rows = rows.append_column("op", pa.repeat(pa.scalar(Operation.READ.value), count))
        return delta_statistics(rows.append_column("partial", pa.repeat(pa.scalar(value=False), count)))


def _encode_groups(rows: pa.Table, sizes: Sequence[int]) -> bytes:
    """Return a Parquet file of the rows with row groups of the given sizes."""
    stream, start = pa.BufferOutputStream(), 0
    with pq.ParquetWriter(stream, rows.schema, **PARQUET) as writer:
        for size in sizes:
            writer.write_table(rows.slice(start, size), row_group_size=_ONE_GROUP)
            start += size
    return stream.getvalue().to_pybytes()


def _footer(content: bytes) -> Struct:
    size = int.from_bytes(content[-_END : -len(_MAGIC)], "little")
    return decode_struct(content[-_END - size : -_END])


def _merged_group(wide: Struct, narrow: Struct, offset: int) -> tuple[Struct, list[tuple[int, int]]]:
    """Return the description of a row group at an offset of the new file, and where the bytes of its columns are.

    The first columns are those of `narrow`; the others are those of `wide`. The result has the start and the size of
    the first columns in their file, and of the others in theirs.
    """
    count = len(PLACE_COLUMNS)
    places, others = narrow[_GROUP_COLUMNS].value.values, wide[_GROUP_COLUMNS].value.values[count:]
    parts = [_extent(places), _extent(others)]
    columns = [*(_moved(column, offset - parts[0][0]) for column in places)]
    columns += [_moved(column, offset + parts[0][1] - parts[1][0]) for column in others]
    metadata = [column[_COLUMN_METADATA].value for column in columns]
    group = dict(wide)
    group[_GROUP_COLUMNS] = Field(wide[_GROUP_COLUMNS].kind, ThriftList(_STRUCT, columns))
    group[_GROUP_BYTES] = Field(_I64, sum(column[_UNCOMPRESSED].value for column in metadata))
    group[_GROUP_OFFSET] = Field(_I64, offset)
    group[_GROUP_COMPRESSED] = Field(_I64, sum(column[_COMPRESSED].value for column in metadata))
    return dict(sorted(group.items())), parts


def _extent(columns: Sequence[Struct]) -> tuple[int, int]:
    """Return where the bytes of column chunks begin, and their number.

    Raises LogCorrupt if the columns are not stored one after another.
    """
    starts = [min(column[_COLUMN_METADATA].value[name].value for name in _offsets(column)) for column in columns]
    sizes = [column[_COLUMN_METADATA].value[_COMPRESSED].value for column in columns]
    expected = starts[0]
    for column, start, size in zip(columns, starts, sizes, strict=True):
        if start != expected:
            name = b".".join(column[_COLUMN_METADATA].value[_PATH].value.values).decode()
            raise LogCorrupt(f"column {name} of a copied file does not follow the column before it")
        expected += size
    return starts[0], sum(sizes)


def _offsets(column: Struct) -> list[int]:
    return [name for name in _PAGE_OFFSETS if name in column[_COLUMN_METADATA].value]


def _moved(column: Struct, by: int) -> Struct:
    """Return the description of a column chunk whose bytes are `by` bytes later."""
    metadata = dict(column[_COLUMN_METADATA].value)
    for name in _offsets(column):
        metadata[name] = Field(_I64, metadata[name].value + by)
    # without page indexes, which are not copied; the offset of the chunk is deprecated, and 0 in files of pyarrow
    return {_COLUMN_OFFSET: Field(_I64, 0), _COLUMN_METADATA: Field(_STRUCT, metadata)}
