"""Survivors: which rows of files a run is made of, found in narrow columns before any wide one is read.

Of many changes of a key one stays, so most rows need never be opened. What is held while the files go by grows with
the keys, not with the changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import pyarrow as pa

from cdc.change import LOG_SCHEMA
from cdc.log.layout import LogFile
from cdc.log.reader import stream_file
from cdc.position import Position
from pipelines.compaction.compact_rows import SURVEYED, needed

FILE: Final = "file"
"""The place of a row's file among those that were given."""
ROW: Final = "row"
"""Its place among the file's rows in the range."""
STEP: Final = 1_000_000
"""Rows that are looked at together, some 100 bytes each."""
READERS: Final = 2
"""Files that are read at once: what one thread decodes another takes rows of."""

_HELD: Final = pa.schema([*(LOG_SCHEMA.field(name) for name in SURVEYED), (FILE, pa.int32()), (ROW, pa.int64())])


def survivors(files: Sequence[LogFile], after: Position, upto: Position, most: int) -> tuple[pa.Table, Position]:
    """The rows of (after, upto] that a compaction of it is made of: SURVEYED, FILE and ROW; and where that ends.

    files: in order of their first position. It ends before upto once more than `most` rows survive, between two files
    that share no transaction, if there are such.
    """
    held, waiting, fresh, last = _HELD.empty_table(), list[pa.Table](), 0, Position(0)
    for number, file in enumerate(files):
        last = max(last, file.last)
        for rows in _surveyed(file, number, after, upto):
            waiting.append(rows)
            fresh += rows.num_rows
            if fresh >= max(min(STEP, most), held.num_rows):
                held, waiting, fresh = _folded(held, waiting), [], 0
        if held.num_rows > most and number + 1 < len(files) and last < min(files[number + 1].first, upto):
            return _folded(held, waiting), last
    return _folded(held, waiting), upto


def whole(files: Sequence[LogFile], found: pa.Table, after: Position, upto: Position) -> list[pa.Table]:
    """Rows of survivors() with all their columns, LOG_SCHEMA, file by file."""
    numbers, places = found[FILE].to_numpy(), found[ROW].to_numpy()
    wanted = {number: np.sort(places[numbers == number]) for number in np.unique(numbers).tolist()}

    def read(number: int) -> list[pa.Table]:
        return list(_taken(files[number], wanted[number], after, upto))

    with ThreadPoolExecutor(READERS) as readers:
        return [rows for parts in readers.map(read, wanted) for rows in parts]


def _surveyed(file: LogFile, number: int, after: Position, upto: Position) -> Iterator[pa.Table]:
    begin = 0
    for rows in stream_file(file, after, upto, SURVEYED):
        places = pa.arange(begin, begin + rows.num_rows)
        begin += rows.num_rows
        yield rows.append_column(FILE, pa.repeat(pa.scalar(number, pa.int32()), rows.num_rows)).append_column(
            ROW, places
        )


def _folded(held: pa.Table, waiting: Sequence[pa.Table]) -> pa.Table:
    rows = pa.concat_tables([held, *waiting]).combine_chunks()
    return rows.take(needed(rows)) if waiting else rows


def _taken(file: LogFile, places: np.ndarray, after: Position, upto: Position) -> Iterator[pa.Table]:
    begin = 0
    for rows in stream_file(file, after, upto, LOG_SCHEMA.names):
        low, high = np.searchsorted(places, (begin, begin + rows.num_rows)).tolist()
        if low < high:
            # what is not taken is let go with the part
            yield rows.take(pa.array(places[low:high] - begin))
        begin += rows.num_rows
