"""Targets: what a sink holds of one table at one moment, as batches of canonical text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import pyarrow as pa

from cdc.errors import CdcError, SinkUnavailable
from cdc.postgres.key_ranges import KeyRange
from cdc.stores.current_rows import APPEND, CurrentRows, quote_identifier, quote_literal
from cdc.stores.published import TableRecord
from cdc.stores.search_index import SearchIndex
from cdc.target_names import POSITION_COLUMN, column_name
from pipelines.verification.canonical_rows import document_batches, target_batch
from pipelines.verification.compare_rows import Rows

_BOUNDS: Final = ((">=", "first"), ("<", "ended"))


class TargetRows(Protocol):
    """One table of a sink; columns go by the names that they have there as the source's would."""

    ranged: bool
    """Whether a range of keys can be read without the rest."""

    @property
    def refusal(self) -> str | None:
        """Why what it holds cannot be compared; None if it can."""

    def has(self, name: str) -> bool:
        """Whether there is a column for that source column."""

    def kind(self, name: str) -> pa.DataType:
        """The type of that column."""

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Rows:
        """Reads the columns of a range, or of all rows, as canonical text."""

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:
        """How many rows there are; the first of the names, if there is one, is a column that there is."""


class DeltaTargetRows:
    """A table in Delta at one version, perhaps one of many in one target."""

    ranged = True

    def __init__(self, record: TableRecord, version: int | None, key: Sequence[str]) -> None:
        """version: of the record's target, None for the newest; key: names of the key's columns."""
        self._table = CurrentRows(record.target, version, record.relation)
        self._key = [column_name(name) for name in key]

    @property
    def refusal(self) -> str | None:
        """Why what it holds cannot be compared; None if it can."""
        if self._table.unread is not None:
            return f"delta-rs does not read the target: {self._table.unread}"
        if not self._table.known:
            return f"the target has mode {self._table.mode!r}, which does not identify the current rows"
        if self._table.mode == APPEND and not self._key:
            return "a history of rows without a key does not show which rows still exist"
        return None

    def has(self, name: str) -> bool:
        """Whether there is a column for that source column."""
        return column_name(name) in self._table.kinds

    def kind(self, name: str) -> pa.DataType:
        """The type of that column."""
        return self._table.kinds[column_name(name)]

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Rows:
        """Reads the columns of a range, or of all rows, as canonical text."""
        columns = [column_name(name) for name in names]

        def rows() -> Iterator[pa.RecordBatch]:
            for batch in self._table.read(columns, self._key, self._where(within)):
                yield target_batch(batch, columns)

        return rows

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:
        """How many rows there are."""
        # the table's own count forgets deletion vectors
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


class UnreadableTarget:
    """A table whose target cannot be opened."""

    ranged = False

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal

    @property
    def refusal(self) -> str | None:
        """Why it cannot be opened."""
        return self._refusal

    def has(self, _name: str) -> bool:
        """Nobody knows."""
        return False

    def kind(self, _name: str) -> pa.DataType:
        """Nothing."""
        return pa.null()

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Rows:  # noqa: ARG002 - there are none
        """None."""
        return lambda: iter(())

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:  # noqa: ARG002 - as above
        """None."""
        return 0


def delta_target(record: TableRecord, version: int | None, key: Sequence[str]) -> TargetRows:
    """As DeltaTarget; one that cannot be opened is refused, so that the others are compared."""
    try:
        return DeltaTargetRows(record, version, key)
    except SinkUnavailable as exc:
        return UnreadableTarget(why(exc))


def why(exc: CdcError) -> str:
    """Why a target is not compared."""
    return f"{exc.code} {exc.message} → {exc.fix}"


class SearchTargetRows:
    """A table's documents in an index at one moment: values are text, as the source sent them."""

    ranged = False

    def __init__(self, index: SearchIndex, topic: str) -> None:
        self._index, self._topic = index, topic

    @property
    def refusal(self) -> str | None:
        """None: an index holds rows as they are."""
        return None

    def has(self, _name: str) -> bool:
        """A document holds every column of its table."""
        return True

    def kind(self, _name: str) -> pa.DataType:
        """Text."""
        return pa.string()

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Rows:  # noqa: ARG002 - never a part
        """Reads the columns; a column that a document lacks is null."""

        def rows() -> Iterator[pa.RecordBatch]:
            return document_batches(self._index.documents(self._topic), names)

        return rows

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:  # noqa: ARG002 - as above
        """How many documents there are."""
        return sum(batch.num_rows for batch in self.rows(names[:1])())
