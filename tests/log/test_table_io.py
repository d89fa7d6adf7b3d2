"""Reading a Parquet file: who does, where its bytes come from Python, and how much of one on disk."""

from __future__ import annotations

import ctypes
import io
import mmap
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc.log.table_io import (
    BLOCK,
    ENCODED_OVERHEAD,
    UNCACHED_BYTES,
    can_read_in_threads,
    encode,
    parquet_file,
    write_encoded,
)
from tests.fixtures.spent import bytes_read


class Recorded(io.BytesIO):
    """Remembers the threads that read it."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.threads: set[int] = set()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self.threads.add(get_ident())
        return super().readinto(buffer)

    def read(self, size: int | None = -1) -> bytes:
        self.threads.add(get_ident())
        return super().read(size)


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder that is on a disk, because that of `tmp_path` may be in memory."""
    with TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def cached_pages(path: Path) -> int:
    """Number of pages of a file that are in the page cache."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped,
    ):
        pages = (ctypes.c_ubyte * (-(-len(mapped) // mmap.PAGESIZE)))()
        begin = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(begin, ctypes.c_size_t(len(mapped)), pages) == 0
        del begin
    return sum(page & 1 for page in pages)


def test_no_other_thread_asks_a_python_file_for_bytes() -> None:
    rows = pa.table({name: list(range(20_000)) for name in "abcdef"})
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, row_group_size=5_000)
    source = Recorded(sink.getvalue().to_pybytes())

    found = parquet_file(source).read_row_groups([0, 1, 2, 3], use_threads=can_read_in_threads(source))

    assert found == rows
    assert source.threads == {get_ident()}


def test_pyarrow_may_read_its_own_memory_by_threads() -> None:
    assert can_read_in_threads(pa.BufferReader(b""))


def test_of_a_file_on_disk_the_footer_is_read_once_and_nothing_else_but_what_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({name: range(40_000) for name in "abcdef"}), path, row_group_size=100)
    footer = pq.read_metadata(path).serialized_size
    assert footer > 65_536, "pyarrow reads as much of the end, and then all of a longer footer"

    before = bytes_read()
    found = parquet_file(path).read_row_groups([7])
    read = bytes_read() - before

    assert found["a"].to_pylist() == list(range(700, 800))
    assert footer < read < footer + 20_000


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 100, b"PAR1" + b"x" * 20 + b"\xff\xff\xff\x7fPAR1"])
def test_a_file_that_is_not_whole_is_an_error_of_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    with pytest.raises((OSError, pa.ArrowException)):
        parquet_file(path)


def test_a_file_that_is_larger_than_its_rows_is_encoded_whole() -> None:
    rows = pa.table({"a": range(20_000)})
    content = encode(rows, group=1)

    assert len(content) > rows.nbytes + ENCODED_OVERHEAD, "else the first attempt has enough memory"
    assert pq.read_table(pa.BufferReader(content)) == rows


@pytest.mark.parametrize("offset", [0, 1])
def test_a_large_file_has_its_content_from_memory_of_any_alignment(on_disk: Path, offset: int) -> None:
    content = np.random.default_rng(1).integers(0, 256, UNCACHED_BYTES + 5 * BLOCK + 7, np.uint8)[offset:].data

    write_encoded(content, on_disk / "file")

    assert (on_disk / "file").read_bytes() == content


def test_whole_blocks_of_a_large_file_are_not_in_the_page_cache(on_disk: Path) -> None:
    content = encode(pa.table({"a": np.random.default_rng(1).integers(0, 1 << 62, 1 << 20)}))
    assert len(content) > UNCACHED_BYTES

    write_encoded(content, on_disk / "file")

    assert cached_pages(on_disk / "file") < 3
    assert (on_disk / "file").read_bytes() == content
    assert cached_pages(on_disk / "file") > UNCACHED_BYTES // BLOCK
