"""Reads the rows of a table in a sink at one version, as batches of canonical text: Delta tables and search indexes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import pyarrow as pa

from cdc.errors import CdcError, SinkUnavailable
from cdc.postgres.key_range_digests import KeyRange
from cdc.stores.current_rows import APPEND, CurrentRows, quote_identifier, quote_literal
from cdc.stores.published_record import TableRecord
from cdc.stores.search_reader import SearchReader
from cdc.target_names import POSITION_COLUMN, column_name
from pipelines.verification.canonical_text import document_batches, target_batch
from pipelines.verification.compare_rows import Rows

CHECK_EVERY: Final = 1.0
"""Seconds between two calls of the function of `CheckedTargetRows`."""
_BOUNDS: Final = ((">=", "first"), ("<", "ended"))


class TargetRows(Protocol):
    """The rows of one table of a sink. Callers name columns as in `ExpectedSchema.names`."""

    ranged: bool
    """Whether the target can read a range of keys without reading all rows."""

    @property
    def refusal(self) -> str | None:
        """Why the rows of the target cannot be compared; None if they can."""

    def has(self, name: str) -> bool:
        """Return whether the target has a column with this name."""

    def kind(self, name: str) -> pa.DataType:
        """Return the type that a column has in the target."""

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Rows:
        """Read the named columns as canonical text; within: a range of keys, None for all rows."""

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:
        """Return the number of rows in a range of keys, or of all rows.

        names: may be empty; otherwise the first name must be a column of the target.
        """


class DeltaTargetRows:
    """A table in a Delta target at one version; the target may contain other tables as well."""

    ranged = True

    def __init__(self, record: TableRecord, version: int | None, key: Sequence[str]) -> None:
        """record: the published record of the table. version: version of the target, None for the newest. key: names of
        the key columns.
        """
        self._table = CurrentRows(record.target, version, record.relation)
        self._key = [column_name(name) for name in key]

    @property
    def refusal(self) -> str | None:
        """Why the current rows of the target cannot be compared; None if they can."""
        if self._table.unread is not None:
            return f"delta-rs cannot read the target: {self._table.unread}"
        if not self._table.known:
            return f"the target has the unknown history mode {self._table.mode!r}, so its current rows are unknown"
        if self._table.mode == APPEND and not self._key:
            return "the target has the history of a table without a key, so its current rows are unknown"
        return None

    def has(self, name: str) -> bool:
        """Return whether the target has a column with this name."""
        return column_name(name) in self._table.kinds

    def kind(self, name: str) -> pa.DataType:
        """Return the type that a column has in the target."""
        return self._table.kinds[column_name(name)]

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Rows:
        """Read the named columns as canonical text; within: a range of keys, None for all rows."""
        columns = [column_name(name) for name in names]

        def rows() -> Iterator[pa.RecordBatch]:
            for batch in self._table.read(columns, self._key, self._where(within)):
                yield target_batch(batch, columns)

        return rows

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:
        """Return the number of rows in a range of keys, or of all rows."""
        # the row count in the Delta log ignores deletion vectors
        columns = [column_name(names[0])] if names else [POSITION_COLUMN]
        found = self._table.read(columns, self._key, self._where(within))
        return sum(batch.num_rows for batch in found)

    def _where(self, within: KeyRange | None) -> str | None:
        if within is None:
            return None
        column, text = column_name(within.column), not pa.types.is_integer(self.kind(within.column))
        bounds = ((sign, getattr(within, name)) for sign, name in _BOUNDS)
        found = [
            f"{quote_identifier(column)} {sign} {quote_literal(at) if text else at}"
            for sign, at in bounds
            if at is not None
        ]
        return " AND ".join(found) or None


class CheckedTargetRows:
    """The rows of another target; while they are read, a function is called about once per second."""

    def __init__(self, target: TargetRows, check: Callable[[], None]) -> None:
        """check: an exception that it raises ends the reading."""
        self._target, self._check = target, check
        self.ranged = target.ranged

    @property
    def refusal(self) -> str | None:
        """Why the rows of the target cannot be compared; None if they can."""
        return self._target.refusal

    def has(self, name: str) -> bool:
        """Return whether the target has a column with this name."""
        return self._target.has(name)

    def kind(self, name: str) -> pa.DataType:
        """Return the type that a column has in the target."""
        return self._target.kind(name)

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Rows:
        """Read the named columns as canonical text; within: a range of keys, None for all rows."""
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
        """Return the number of rows in a range of keys, or of all rows."""
        return self._target.count(names, within)


class UnreadableTarget:
    """Placeholder for a target that cannot be opened. It has no rows and no columns."""

    ranged = False

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal

    @property
    def refusal(self) -> str | None:
        """Why the target cannot be opened."""
        return self._refusal

    def has(self, _name: str) -> bool:
        """Return False, because the columns are unknown."""
        return False

    def kind(self, _name: str) -> pa.DataType:
        """Return the null type, because the columns are unknown."""
        return pa.null()

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Rows:  # noqa: ARG002 - there are no rows
        """Return no rows."""
        return lambda: iter(())

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:  # noqa: ARG002 - as above
        """Return 0, because a target that cannot be opened has no readable rows."""
        return 0


def delta_target(record: TableRecord, version: int | None, key: Sequence[str]) -> TargetRows:
    """Open the target of a table in a Delta sink; return an UnreadableTarget with the reason if this fails.

    So an unreadable target does not prevent the comparison of other tables.
    """
    try:
        return DeltaTargetRows(record, version, key)
    except SinkUnavailable as exc:
        return UnreadableTarget(refusal_reason(exc))


def refusal_reason(exc: CdcError) -> str:
    """Return the reason that the verdict shows for a table whose target cannot be read."""
    return f"{exc.code} {exc.message} → {exc.fix}"


class SearchTargetRows:
    """The documents of a table in an opened search index. Values are text, as the source sent them, or masked."""

    ranged = False

    def __init__(self, index: SearchReader, topic: str) -> None:
        self._index, self._topic = index, topic
        self._columns = frozenset(index.column_names(topic))

    @property
    def refusal(self) -> str | None:
        """Always None, because an index has only current rows and so can always be compared."""
        return None

    def has(self, name: str) -> bool:
        """Return whether the documents have a column with this name."""
        return name in self._columns

    def kind(self, _name: str) -> pa.DataType:
        """Return the string type, because a document stores text."""
        return pa.string()

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Rows:  # noqa: ARG002 - never a range
        """Read the columns of all documents; a column that is absent from a document is null."""

        def rows() -> Iterator[pa.RecordBatch]:
            return document_batches(self._index.documents(self._topic), names)

        return rows

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:  # noqa: ARG002 - as above
        """Return the number of documents of the table."""
        return sum(batch.num_rows for batch in self.rows(names[:1])())
