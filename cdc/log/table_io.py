"""Functions that open the log's Delta tables and read and write its Parquet files, on disk or in an object store."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc import atomic_file
from cdc.array_pool import ArrayPool
from cdc.bucket_files import BucketPath, Options, Root, as_root, options_of, storage_errors
from cdc.delta_protocol.actions import decode_commit
from cdc.delta_protocol.commits import commit_file
from cdc.errors import LogCorrupt, LogInaccessible
from cdc.log.disk_format import GROUP, PARQUET

_LOG: Final = "_delta_log"
_READABLE: Final = (
    "grant this user read and write access to the directory log.path, and access to each directory above it"
)
WRITE_BYTES: Final = 1 << 17
"""Maximum number of bytes per write call.

For a larger call Linux may need a large contiguous page for its page cache. On a virtual machine that returns free
memory to its host, a call with 4 MB took ten times as long.
"""
UNCACHED_BYTES: Final = 4 << 20
"""Size in bytes from which an encoded file is written without the page cache.

A new page of the cache costs more than writing it: without the cache a file needs a tenth of the CPU time. A reader of
the file must then read it from the disk.
"""
BLOCK: Final = 4096
"""Size in bytes of the parts that can be written without the page cache, which is that of a page of memory."""
ENCODED_OVERHEAD: Final = 1 << 20
"""Bytes that an encoded file may need in addition to those of its rows; if it needs more, it is encoded again."""
_ENCODED: Final = ArrayPool(spare=32 << 20)
"""Memory of all encoded files of the process."""
SMALL_FILE: Final = 64 << 10
"""Maximum size in bytes of a file on a disk that is read at once, footer and rows together, and in one thread."""
WHOLE_FETCH_BYTES: Final = 8 << 20
"""Maximum size in bytes of a file in an object store that is fetched in one request.

To fetch only a part of such a file would be no faster.
"""


def is_table(path: Root) -> bool:
    """Return True if a Delta table exists at `path`.

    Raises LogInaccessible if the directory cannot be read. For an object store it can also raise LogUnreachable.
    """
    # delta-rs blocks all other threads of the process while it sends this request to a store
    if isinstance(path, BucketPath):
        return (path / _LOG).is_dir()
    try:
        return DeltaTable.is_deltatable(str(path))
    except OSError as exc:
        raise LogInaccessible(
            f"the log's directory {str(path)!r} cannot be read: {_first_line(exc)}", remedy=_READABLE
        ) from exc


def open_table(path: Root, version: int | None = None) -> DeltaTable:
    """Open the Delta table at its current version, or at the given one.

    Raises LogCorrupt if a commit or a checkpoint is missing or cannot be read. For an object store it raises
    LogUnreachable and LogInaccessible.
    """
    try:
        with storage_errors(path):
            return DeltaTable(str(path), version=version, storage_options=options_of(path))
    except (DeltaError, OSError) as exc:
        raise LogCorrupt(f"table {path.name!r} of the log cannot be opened: {_first_line(exc)}") from exc


@contextmanager
def _read_errors(path: Root) -> Iterator[None]:
    """Raise LogCorrupt, LogUnreachable or LogInaccessible if an open table cannot be read.

    delta-rs reads some values from the files of the table only when they are requested. The directory may have been
    deleted since the table was opened.
    """
    try:
        with storage_errors(path):
            yield
    except (DeltaError, OSError, IndexError) as exc:
        raise LogCorrupt(f"table {path.name!r} of the log cannot be read: {_first_line(exc)}") from exc


def update_table(path: Root, table: DeltaTable) -> None:
    """Move an open Delta table to its newest version; raises the errors of `open_table`."""
    with _read_errors(path):
        table.update_incremental()


def transaction_version(path: Root, table: DeltaTable, app_id: str) -> int | None:
    """Return the version of the `txn` of an application id, None without one; raises the errors of `open_table`."""
    with _read_errors(path):
        return table.transaction_version(app_id)


def add_actions(path: Root, table: DeltaTable) -> pa.Table:
    """Return one row per data file of the table, with delta-rs' flattened columns of its add actions.

    Raises the errors of `open_table`.
    """
    with _read_errors(path):
        return pa.table(table.get_add_actions(flatten=True))


def last_commit_info(path: Root, table: DeltaTable) -> dict[str, Any]:
    """Return the metadata of the commit that created the table's current version.

    The value of `timestamp` is in milliseconds UTC. Raises the errors of `open_table`.
    """
    if isinstance(path, BucketPath):
        # delta-rs would block all other threads, as in is_table; a commit that was cleaned up is in the checkpoint
        with suppress(FileNotFoundError):
            actions = decode_commit(commit_file(path, table.version()).read_bytes())
            return next(action["commitInfo"] for action in actions if "commitInfo" in action)
    with _read_errors(path):
        return table.history(1)[0]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


_MAGIC: Final = b"PAR1"
"""The four bytes with which a Parquet file begins and ends."""
_END: Final = 8
"""Number of bytes at the end of a Parquet file that contain the length of the footer and _MAGIC."""


def write_parquet(rows: pa.Table, path: Root, order: pa.Array | None = None, group: int = GROUP) -> int:
    """Write rows to a new data file in an existing folder, and return the size of the file in bytes.

    The file is durable when the function returns. `order` contains the row numbers in the order of the file; by default
    the rows keep their order. If `order` is given, pass `rows` in one chunk: `take` would join several chunks at each
    call. `group` is the number of rows of a row group.
    """
    if isinstance(path, BucketPath):
        content = encode(rows, order, group)
        path.write_bytes(content)
        return len(content)
    with _durable_file(path) as file:
        _write(rows, file, order, group)
    return path.stat().st_size


def encode(rows: pa.Table, order: pa.Array | None = None, group: int = GROUP) -> memoryview:
    """Encode rows as `write_parquet` does, and return the content of the file, in memory that is used again."""
    capacity = rows.nbytes + ENCODED_OVERHEAD
    while True:
        memory = _ENCODED.array(capacity)
        try:
            with pa.FixedSizeBufferWriter(pa.py_buffer(memory)) as stream:
                _write(rows, stream, order, group)
                return memory[: stream.tell()].data
        except OSError:  # the file is larger than the memory
            capacity *= 2


def write_encoded(content: memoryview, path: Root) -> None:
    """Write the result of `encode` to a new data file in an existing folder.

    The file is durable when the function returns.
    """
    if isinstance(path, BucketPath):
        path.write_bytes(content)
        return
    with _durable_file(path) as file:
        # what is left goes through the cache, which also reports the errors of a full disk
        written = _write_uncached(file.fileno(), content) if len(content) >= UNCACHED_BYTES else 0
        for start in range(written, len(content), WRITE_BYTES):
            file.write(content[start : start + WRITE_BYTES])


def _write_uncached(descriptor: int, content: memoryview) -> int:
    """Write the whole blocks of the content without the page cache; return the number of bytes written.

    It is 0 if the file system cannot do this, and it may be smaller than the whole blocks if the disk is full.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        return os.write(descriptor, content[: len(content) // BLOCK * BLOCK])
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return 0
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


@contextmanager
def _durable_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing, and make it durable after the block; if the block fails, remove the file."""
    try:
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        atomic_file.sync(path.parent)
    except BaseException:
        with suppress(OSError):  # the next attempt may need the disk space
            path.unlink(missing_ok=True)
        raise


def _write(rows: pa.Table, sink: Any, order: pa.Array | None, group: int) -> None:
    if order is None:
        pq.write_table(rows, sink, row_group_size=group, **PARQUET)
        return
    with pq.ParquetWriter(sink, rows.schema, **PARQUET) as writer:
        # one row group at a time: reordering all rows at once would need twice the memory
        for start in range(0, len(order), group):
            writer.write_table(rows.take(order[start : start + group]), row_group_size=group)


def footer(path: Root, size: int) -> pq.FileMetaData:
    """Return the footer of a data file of `size` bytes. Raises OSError or an Arrow error if the file is incomplete."""
    with storage_errors(path):
        return pq.read_metadata(path.reader(size) if isinstance(path, BucketPath) else path)


def open_data_file(path: str | Root, options: Options = (), size: int | None = None) -> Any:
    """Return the source from which pyarrow reads a data file: a path on a disk, or a file object for an object store.

    Pass `size`, the size of the file in bytes, only if all of the file is read. A small file is then fetched in one
    request.
    """
    place = as_root(path, options)
    if not isinstance(place, BucketPath):
        return _copy_to_arrow(place.read_bytes()) if size is not None and size <= SMALL_FILE else place
    return _copy_to_arrow(place.read_bytes()) if size is not None and size <= WHOLE_FETCH_BYTES else place.reader(size)


def parquet_file(source: Any) -> pq.ParquetFile:
    """Open `source` as a Parquet file that verifies page checksums.

    A Python file object is not pre-buffered, because pyarrow's threads would keep Python memory for a moment after the
    read. If a thread releases this memory while the interpreter exits, the process crashes.
    """
    metadata = _read_footer(source) if isinstance(source, str | Path) else None
    return pq.ParquetFile(
        source, metadata=metadata, page_checksum_verification=True, pre_buffer=can_read_in_threads(source)
    )


def _read_footer(path: str | Path) -> pq.FileMetaData:
    """Return the footer of a file on disk, and read only the bytes of the footer.

    If pyarrow opened the file itself, it would read the last 64 KiB, and would read a longer footer twice.
    """
    with Path(path).open("rb", buffering=0) as file:
        file.seek(-_END, os.SEEK_END)
        end = file.read(_END)
        file.seek(-_END - int.from_bytes(end[:4], "little"), os.SEEK_END)
        return pq.read_metadata(pa.BufferReader(_MAGIC + file.readall()))


def can_read_in_threads(source: Any) -> bool:
    """Return True if pyarrow's threads may read the source: a path or an Arrow file, but not a Python file object."""
    return isinstance(source, str | Path | pa.NativeFile)


def _copy_to_arrow(content: bytes) -> pa.BufferReader:
    """Copy the content to memory that pyarrow owns, so that pyarrow's threads can free it at any time."""
    memory = pa.allocate_buffer(len(content))
    memoryview(memory).cast("B")[:] = content
    return pa.BufferReader(memory)
