"""Blobs: rows dealt into parts, and Arrow tables as bytes, in which Spark moves them without ever looking at them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa

_LZ4: Final = pa.ipc.IpcWriteOptions(compression="lz4")


def places_by_part(part_of: np.ndarray, parts: int) -> Iterator[tuple[int, pa.Array]]:
    """The part of each row → of every part, in its order, the places of its rows."""
    places = np.argsort(part_of, kind="stable")
    ends = np.cumsum(np.bincount(part_of, minlength=parts)).tolist()
    for part, (start, end) in enumerate(pairwise([0, *ends])):
        yield part, pa.array(places[start:end])


def packed(rows: pa.Table) -> bytes:
    """The rows as one blob."""
    written = pa.BufferOutputStream()
    with pa.ipc.new_stream(written, rows.schema, options=_LZ4) as stream:
        stream.write_table(rows)
    return bytes(written.getvalue())


def opened(blob: pa.Buffer | bytes) -> pa.Table:
    """The rows of a blob."""
    return pa.ipc.open_stream(blob).read_all()
