"""Who reads a Parquet file: of one that asks Python for its bytes, only the thread that wants its rows."""

from __future__ import annotations

import io
from threading import get_ident

import pyarrow as pa
import pyarrow.parquet as pq

from cdc.log.storage import by_threads, parquet_file


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


def test_no_other_thread_asks_a_python_file_for_bytes() -> None:
    rows = pa.table({name: list(range(20_000)) for name in "abcdef"})
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, row_group_size=5_000)
    source = Recorded(sink.getvalue().to_pybytes())

    found = parquet_file(source).read_row_groups([0, 1, 2, 3], use_threads=by_threads(source))

    assert found == rows
    assert source.threads == {get_ident()}


def test_pyarrow_may_read_its_own_memory_by_threads() -> None:
    assert by_threads(pa.BufferReader(b""))
