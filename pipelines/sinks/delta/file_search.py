"""File search: finds the rows with some keys by reading the key columns of data files that no key index contains.

A batch has few keys and a file has many rows, so a file is read in two steps. First the values of each key column are
compared with those of the batch, which takes a tenth of the time of hashing them. Only the rows that remain are hashed,
and compared as the key index compares them. Files and row groups whose statistics exclude all keys are not read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.sinks.delta.indexed.delta_log import LiveFile, LiveFiles
from pipelines.sinks.delta.indexed.key_hashes import hash_keys
from pipelines.sinks.delta.indexed.key_index import FoundRows, KeyHashes, KeyRun

THREADS: Final = 4
"""Number of files that are read at the same time: reading waits for the store, or decodes without the GIL."""
ROWS_AT_ONCE: Final = 1_000_000
"""Approximate number of rows whose key columns a thread has in memory."""


class WantedKeys:
    """The keys of a batch, which `find` looks for in data files. Several threads use it at the same time."""

    def __init__(
        self, names: Sequence[str], keys: pa.Table, hashes: KeyHashes, secret: bytes, null_column: str | None = None
    ) -> None:
        """names: the key columns. keys: their values. hashes: the hashes of the keys without a NULL. secret: the key of
        the hash function. null_column: only rows in which this column is null are found; None: all rows.
        """
        self._names, self._secret, self._null_column = tuple(names), secret, null_column
        self._columns = tuple(_values(column) for column in keys.select(list(names)).columns)
        self._hashes = KeyRun.of(hashes, np.arange(hashes.high.size, dtype=np.uint64), ())
        first = self._columns[0]
        has_integers = first is not None and pa.types.is_integer(first.type)
        self._integers: list[int] | None = sorted(pc.drop_null(first).to_pylist()) if has_integers else None

    def find(
        self, files: LiveFiles, searched: Iterable[tuple[int, LiveFile]], rows_at_once: int = ROWS_AT_ONCE
    ) -> FoundRows:
        """Return every row with a wanted key, also deleted rows, in some live files.

        searched: number of a file in the index, and the file. rows_at_once: see ROWS_AT_ONCE.
        """
        chosen = [(number, file) for number, file in searched if self._may_be_in(_bounds(file, self._names[0]))]
        if not chosen or not self._hashes.size:
            return concatenated([])
        with ThreadPoolExecutor(min(THREADS, len(chosen)), "file-search") as threads:
            return concatenated(
                threads.map(partial(self._find_in_file, files, rows_at_once), *zip(*chosen, strict=True))
            )

    def _find_in_file(self, files: LiveFiles, rows_at_once: int, number: int, file: LiveFile) -> FoundRows:
        wanted, rows = list[np.ndarray](), list[np.ndarray]()
        needed = self._names if self._null_column is None else (*self._names, self._null_column)
        for first, read in files.read_groups(file, needed, self._may_have_key, rows_at_once):
            candidates = np.flatnonzero(self._candidates(read))
            if not candidates.size:
                continue
            keys = read.select(list(self._names)).take(pa.array(candidates)).columns
            hashes, places = hash_keys(keys, self._secret)
            matches, keys_of_batch = self._hashes.find(hashes)
            wanted.append(keys_of_batch.astype(np.int64))
            rows.append(first[candidates[places[matches]]])
        none = np.empty(0, np.int64)
        numbers = np.concatenate([none, *wanted])
        return FoundRows(numbers, np.full(numbers.size, number, np.int64), np.concatenate([none, *rows]))

    def _candidates(self, rows: pa.Table) -> np.ndarray:
        """Return one bool per row: whether it may have a wanted key."""
        may = np.ones(rows.num_rows, bool)
        for name, wanted in zip(self._names, self._columns, strict=True):
            if (matches := _is_in(rows[name], wanted)) is not None:
                may &= matches.to_numpy(zero_copy_only=False)
        if self._null_column is not None:
            may &= pc.is_null(rows[self._null_column]).to_numpy()
        return may

    def _may_have_key(self, group: pq.RowGroupMetaData) -> bool:
        """Return whether a row group may contain a wanted key, by its statistics."""
        columns = (group.column(number) for number in range(group.num_columns))
        column = next((column for column in columns if column.path_in_schema == self._names[0]), None)
        if column is None or column.statistics is None or not column.statistics.has_min_max:
            return True
        return self._may_be_in((column.statistics.min, column.statistics.max))

    def _may_be_in(self, bounds: tuple[Any, Any]) -> bool:
        least, greatest = bounds
        if self._integers is None or not isinstance(least, int) or not isinstance(greatest, int):
            return True
        return bisect_left(self._integers, least) < bisect_right(self._integers, greatest)


def may_have_keys(files: Iterable[LiveFile], name: str, values: pa.ChunkedArray) -> bool:
    """Return whether a file may have a row with a wanted key, by the bounds of its first key column.

    name: the first key column. values: its values in the wanted keys.
    """
    if not pa.types.is_integer(values.type):
        return True
    first, last = (bound.as_py() for bound in pc.min_max(values).values())
    if first is None:
        return True
    for file in files:
        least, greatest = _bounds(file, name)
        if not isinstance(least, int) or not isinstance(greatest, int) or (least <= last and first <= greatest):
            return True
    return False


def concatenated(parts: Iterable[FoundRows]) -> FoundRows:
    """Return the found rows of all parts."""
    none = FoundRows(*(np.empty(0, np.int64) for _ in FoundRows._fields))
    return FoundRows(*(np.concatenate(arrays) for arrays in zip(none, *parts, strict=True)))


def _bounds(file: LiveFile, column: str) -> tuple[Any, Any]:
    """Return the least and the greatest value of a column in a file by its statistics; (None, None) if unknown."""
    return file.stats.get("minValues", {}).get(column), file.stats.get("maxValues", {}).get(column)


def _values(column: pa.ChunkedArray) -> pa.Array | None:
    """Return the distinct values of a key column; None if values of its type are compared by hash only."""
    kind = _comparable(column.type)
    return None if kind is None else pc.unique(column.cast(kind))


def _is_in(column: pa.ChunkedArray, wanted: pa.Array | None) -> pa.ChunkedArray | None:
    """Return for each value whether it may be among the wanted ones; None if every value may be."""
    if wanted is None or _comparable(column.type) != wanted.type:
        return None
    return pc.is_in(column.cast(wanted.type), wanted)


def _comparable(kind: pa.DataType) -> pa.DataType | None:
    """Return the type in which values are compared, if those that differ in it have different hashes; None if not."""
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.large_string()
    return kind if pa.types.is_date32(kind) else None
