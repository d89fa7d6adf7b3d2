"""Opening and writing of the log's tables and data files, in a directory or in an object store."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc import atomic_file
from cdc.errors import LogCorrupt, LogInaccessible
from cdc.log.layout import GROUP, PARQUET, commit_file
from cdc.log.object_path import BucketPath, Options, Root, as_root, options_of, storage_errors

_LOG: Final = "_delta_log"
_READABLE: Final = "let this user read and write the directory log.path, and every one above it"
PIECE: Final = 1 << 17
"""Bytes that are written at once: Linux takes one large page of its cache for a larger piece, and it may have to be
made: 4 MB in one piece took ten times as long on a virtual machine that gives back what is free."""
TOGETHER: Final = 1 << 19
"""Bytes of a file that are handed to Python at once: a column has a few pages, and for each a busy process waits for
Python's lock."""
WHOLE: Final = 8 << 20
"""Bytes of a file of an object store up to which it is fetched in one request: as fast as asking for a part of it."""


def is_table(path: Root) -> bool:
    """Whether there is a Delta table; raises LogInaccessible, and LogUnreachable for an object store."""
    # while delta-rs asks a store this, no other thread of the process runs
    if isinstance(path, BucketPath):
        return (path / _LOG).is_dir()
    try:
        return DeltaTable.is_deltatable(str(path))
    except OSError as exc:
        raise LogInaccessible(
            f"the log's directory {str(path)!r} cannot be read: {_first_line(exc)}", remedy=_READABLE
        ) from exc


def open_table(path: Root, version: int | None = None) -> DeltaTable:
    """The Delta table as it is now, or was at a version; raises LogUnreachable and LogInaccessible for a bucket.

    Raises LogCorrupt if a commit or a checkpoint is missing or cannot be read.
    """
    try:
        with storage_errors(path):
            return DeltaTable(str(path), version=version, storage_options=options_of(path))
    except (DeltaError, OSError) as exc:
        raise LogCorrupt(f"table {path.name!r} of the log cannot be opened: {_first_line(exc)}") from exc


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def last_commit_info(path: Root, table: DeltaTable) -> dict[str, Any]:
    """What the commit says of itself that made the table's version, with its `timestamp` in ms UTC."""
    if isinstance(path, BucketPath):
        # as is_table; a commit that was cleaned away is in the checkpoint
        with suppress(FileNotFoundError):
            actions = map(json.loads, commit_file(path, table.version()).read_bytes().splitlines())
            return next(action["commitInfo"] for action in actions if "commitInfo" in action)
    with storage_errors(path):
        return table.history(1)[0]


_MAGIC: Final = b"PAR1"
"""What a Parquet file begins and ends with."""
_END: Final = 8
"""Bytes behind the footer: its length, and that."""


def write_parquet(rows: pa.Table, path: Root, order: pa.Array | None = None, group: int = GROUP) -> int:
    """Write rows to a new data file of the log, whose folder is there; its bytes. Durable when it returns.

    order: numbers of the rows, in that of the file, for rows in one piece: to take from many joins them each time;
    default as they are. group: rows of a row group.
    """
    if isinstance(path, BucketPath):
        content = b"".join(encode(rows, order, group))
        path.write_bytes(content)
        return len(content)
    with _made(path) as file:
        _write(rows, file, order, group)
    return path.stat().st_size


class _Pieces:
    """A file for pyarrow, of which every piece that is written stays by itself.

    One block for all of them grows with the file, and its pages are fresh ones: they cost a quarter of the encoding.
    """

    closed = False

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self._size = 0

    def write(self, piece: bytes) -> int:
        self.written.append(piece)
        self._size += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """What is written stays."""


def encode(rows: pa.Table, order: pa.Array | None = None, group: int = GROUP) -> list[bytes]:
    """What write_parquet would write, in pieces."""
    sink = _Pieces()
    with pa.BufferedOutputStream(pa.PythonFile(sink, mode="w"), TOGETHER) as stream:
        _write(rows, stream, order, group)
    return sink.written


def write_encoded(content: Sequence[bytes], path: Root) -> None:
    """Write what encode gave to a new data file, whose folder is there. Durable when it returns."""
    if isinstance(path, BucketPath):
        path.write_bytes(b"".join(content))
        return
    with _made(path) as file:
        for piece in content:
            for start in range(0, len(piece), PIECE):
                file.write(memoryview(piece)[start : start + PIECE])


@contextmanager
def _made(path: Path) -> Iterator[BinaryIO]:
    """A new file, durable behind the block."""
    try:
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        atomic_file.sync(path.parent)
    except BaseException:
        with suppress(OSError):  # what was begun takes room that may be wanted for the next attempt
            path.unlink(missing_ok=True)
        raise


def _write(rows: pa.Table, sink: Any, order: pa.Array | None, group: int) -> None:
    if order is None:
        pq.write_table(rows, sink, row_group_size=group, **PARQUET)
        return
    with pq.ParquetWriter(sink, rows.schema, **PARQUET) as writer:
        for start in range(0, len(order), group):  # group by group: all rows in another order would be all rows twice
            writer.write_table(rows.take(order[start : start + group]), row_group_size=group)


def footer(path: Root, size: int) -> pq.FileMetaData:
    """What a data file of that size says of itself; raises OSError or an Arrow error if it is not whole."""
    with storage_errors(path):
        return pq.read_metadata(path.reader(size) if isinstance(path, BucketPath) else path)


def open_data_file(path: str | Root, options: Options = (), size: int | None = None) -> Any:
    """What pyarrow reads a data file from: the path, or for an object store what fetches from there.

    size: of the file, if it is read and not only looked at: a small one is fetched as a whole.
    """
    place = as_root(path, options)
    if not isinstance(place, BucketPath):
        return place
    return _in_arrow(place.read_bytes()) if size is not None and size <= WHOLE else place.reader(size)


def parquet_file(source: Any) -> pq.ParquetFile:
    """An opened file as Parquet, whose checksums are looked at.

    Of one that asks Python for bytes nothing is read ahead: pyarrow's threads would hold on to them for a moment after
    they are read, and who gives Python memory back while the process ends takes the process with it.
    """
    about = _exactly(source) if isinstance(source, str | Path) else None
    return pq.ParquetFile(
        source, metadata=about, page_checksum_verification=True, pre_buffer=can_read_in_threads(source)
    )


def _exactly(path: str | Path) -> pq.FileMetaData:
    """The footer of a file on disk, of whose end pyarrow reads 64 KiB, and then all of the footer if that is longer."""
    with Path(path).open("rb", buffering=0) as file:
        file.seek(-_END, os.SEEK_END)
        end = file.read(_END)
        file.seek(-_END - int.from_bytes(end[:4], "little"), os.SEEK_END)
        return pq.read_metadata(pa.BufferReader(_MAGIC + file.readall()))


def can_read_in_threads(source: Any) -> bool:
    """Whether pyarrow's threads may read an opened file: not one that asks Python for bytes, as for parquet_file."""
    return isinstance(source, str | Path | pa.NativeFile)


def _in_arrow(content: bytes) -> pa.BufferReader:
    """A copy in memory of pyarrow's own, which its threads may give back at any time."""
    memory = pa.allocate_buffer(len(content))
    memoryview(memory).cast("B")[:] = content
    return pa.BufferReader(memory)
