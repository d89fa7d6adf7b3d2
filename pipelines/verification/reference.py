"""References: what the rows of a table should be: those of the source at a cut, or what the log says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.postgres.key_ranges import Digest, KeyRange, can_digest, count_rows, digest_rows, range_rows
from cdc.table import TableSchema
from pipelines.verification.canonical_rows import source_batch, text_batch
from pipelines.verification.compare_rows import ComparedColumns, Rows
from pipelines.verification.digest import digest_column
from pipelines.verification.expected_schema import Masking
from pipelines.verification.source_cut import ConsistentCut


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """Which columns of a table are compared, and as what."""

    schema: TableSchema
    """Of the source, as the publication sends it."""
    places: tuple[int, ...]
    """Among the sent columns."""
    kinds: tuple[pa.DataType, ...]
    """The target's type of each."""
    masks: tuple[Masking | None, ...]
    """What hides each in the target."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns, at the source."""
        return tuple(self.schema.sent[place].name for place in self.places)

    def masked(self, texts: pa.RecordBatch) -> pa.RecordBatch:
        """The columns as the target should show them."""
        if not any(self.masks):
            return texts
        return text_batch(
            [text if mask is None else mask(text) for text, mask in zip(texts.columns, self.masks, strict=True)]
        )

    @property
    def shape(self) -> ComparedColumns:
        """Where the key is among them; it has to be there."""
        names = self.names
        return ComparedColumns(names, tuple(names.index(column.name) for column in self.schema.key))


class Reference(Protocol):
    """One table as it should be."""

    def rows(self, wanted: ComparedRows, within: KeyRange | None = None) -> Rows:
        """Reads the columns of a range, or of all rows, as canonical text."""

    def count(self, wanted: ComparedRows, within: KeyRange | None = None) -> int:
        """How many rows there are."""

    def digest(self, wanted: ComparedRows, within: KeyRange | None = None) -> Digest | None:
        """The digest of the columns; None if it cannot be made without the rows."""


class SourceTable:
    """A table of the source at a cut."""

    def __init__(self, cut: ConsistentCut) -> None:
        self._cut = cut

    def rows(self, wanted: ComparedRows, within: KeyRange | None = None) -> Rows:
        """Reads the columns of a range, or of all rows, as canonical text."""
        schema = wanted.schema

        def chunks() -> Iterator[memoryview]:
            if within is None:
                return self._cut.rows_of(schema)
            return range_rows(self._cut.source, schema, self._cut.publication, within)

        def rows() -> Iterator[pa.RecordBatch]:
            decoder = CopyDecoder(schema, position=self._cut.position, xid=0, committed_at=0, first_ordinal=0)
            for chunk in chunks():
                batch = decoder.feed(chunk)
                if batch is not None:
                    yield wanted.masked(source_batch(batch, wanted.places, wanted.kinds))
            decoder.finish()

        return rows

    def count(self, wanted: ComparedRows, within: KeyRange | None = None) -> int:
        """How many rows there are."""
        return count_rows(self._cut.source, wanted.schema, self._cut.publication, within)

    def digest(self, wanted: ComparedRows, within: KeyRange | None = None) -> Digest | None:
        """The digest of the columns, made by the server; None if it cannot make one of them."""
        sent = [wanted.schema.sent[place] for place in wanted.places]
        pairs = zip(sent, wanted.kinds, strict=True)
        columns = [digest_column(column, kind) for column, kind in pairs]
        known = [column for column in columns if column is not None]
        if any(wanted.masks) or len(known) < len(columns) or not can_digest(self._cut.source):
            return None
        return digest_rows(self._cut.source, wanted.schema, self._cut.publication, known, within)
