"""The decoder alone: frames of a ten-column table in memory to log rows, beside the rate of copying memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.decoder_events import DecodedRows
from cdc.pgoutput.message_parser import FrameBatch
from cdc.pgoutput.messages import Insert
from tests.pgoutput.encode import frame
from tests.pgoutput.streams import table, transaction

ROWS_PER_TRANSACTION = 100
COPIED = 256 << 20
"""Bytes of the array whose copy tells the machine's rate: larger than any cache."""


def measure(rows: int, runs: int) -> Iterator[tuple[float, float]]:
    """(rows per second of the decoder, GiB per second of a copy in memory) of each run, one thread."""
    batches = list(_frames(rows))
    _decode(batches)  # loads compiled code and does not count
    for _ in range(runs):
        began = time.perf_counter()
        decoded = _decode(batches)
        seconds = time.perf_counter() - began
        assert decoded == rows
        yield rows / seconds, _copy_rate()


def _decode(batches: list[FrameBatch]) -> int:
    decoder = ColumnarDecoder()
    decoder.define(table(1, width=10), announce=False)
    events = (event for batch in batches for event in decoder.decode(batch))
    return sum(event.rows.num_rows for event in events if isinstance(event, DecodedRows))


def _frames(rows: int) -> Iterator[FrameBatch]:
    """Batches of the size that the reader receives while behind."""
    inserts = [
        frame(Insert(1, (str(n), f"item {n}", "2026-01-01 00:00:00+00", "t", "12.50", None, "97", "new", "", "x")))
        for n in range(ROWS_PER_TRANSACTION)
    ]
    for first in range(0, rows, 50 * ROWS_PER_TRANSACTION):
        frames: list[bytes] = []
        for place in range(first, min(rows, first + 50 * ROWS_PER_TRANSACTION), ROWS_PER_TRANSACTION):
            begin, commit = (frame(message) for message in transaction(1_000 + place))
            frames += [begin, *inserts, commit]
        yield FrameBatch.of(frames)


def _copy_rate() -> float:
    source = np.ones(COPIED, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    began = time.perf_counter()
    np.copyto(target, source)
    return COPIED / (time.perf_counter() - began) / 2**30
