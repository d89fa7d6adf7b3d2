"""The rows of a table in a sink at one version, as batches of canonical text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import pyarrow as pa

from cdc.postgres.key_range_digests import KeyRange
from cdc.targets.sink_reading import ReadableTable
from pipelines.verification.canonical_text import target_batch
from pipelines.verification.compare_rows import Rows

CHECK_EVERY: Final = 1.0
"""Seconds between two calls of the function of `CheckedTargetRows`."""


class TargetRows(Protocol):
    """The rows of one table of a sink. Callers name columns as in `ExpectedSchema.names`."""

    @property
    def reads_ranges(self) -> bool:
        """Whether the target can read a range of keys without reading all rows."""

    @property
    def refusal(self) -> str | None:
        """Why the rows of the target cannot be compared; None if they can."""

    def kind(self, name: str) -> pa.DataType | None:
        """Return the type that a column has in the target; None if the target does not have the column."""

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Rows:
        """Read the named columns as canonical text; within: a range of keys, None for all rows."""

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:
        """Return the number of rows in a range of keys, or of all rows.

        names: may be empty; otherwise the first name must be a column of the target.
        """


class OpenedTargetRows:
    """The rows of an opened table, of any kind of sink."""

    def __init__(self, table: ReadableTable) -> None:
        self._table = table

    @property
    def reads_ranges(self) -> bool:
        """See TargetRows.reads_ranges."""
        return self._table.reads_ranges

    @property
    def refusal(self) -> str | None:
        """See TargetRows.refusal."""
        return self._table.refusal

    def kind(self, name: str) -> pa.DataType | None:
        """See TargetRows.kind."""
        return self._table.kind(name)

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Rows:
        """See TargetRows.rows."""

        def rows() -> Iterator[pa.RecordBatch]:
            for batch in self._table.rows(names, within):
                yield target_batch(batch)

        return rows

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:
        """See TargetRows.count."""
        return self._table.count(names, within)


class CheckedTargetRows:
    """The rows of another target; while they are read, a function is called about once per second."""

    def __init__(self, target: TargetRows, check: Callable[[], None]) -> None:
        """check: an exception that it raises ends the reading."""
        self._target, self._check = target, check

    @property
    def reads_ranges(self) -> bool:
        """See TargetRows.reads_ranges."""
        return self._target.reads_ranges

    @property
    def refusal(self) -> str | None:
        """See TargetRows.refusal."""
        return self._target.refusal

    def kind(self, name: str) -> pa.DataType | None:
        """See TargetRows.kind."""
        return self._target.kind(name)

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Rows:
        """See TargetRows.rows."""
        read = self._target.rows(names, within)

        def rows() -> Iterator[pa.RecordBatch]:
            due = time.monotonic() + CHECK_EVERY
            for batch in read():
                if time.monotonic() >= due:
                    self._check()
                    due = time.monotonic() + CHECK_EVERY
                yield batch

        return rows

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:
        """See TargetRows.count."""
        return self._target.count(names, within)
