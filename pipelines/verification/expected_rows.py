"""What the target of a table should contain: its columns by the definition, and its rows as the source has them.

`ExpectedSchema` applies the rules of the definition, so a column that a rule drops does not count as missing. Columns
that only Spark or a Python function of the user can compute are not compared, and the verdict says so. `ExpectedRows`
is the interface to the expected rows. `SourceRows` implements it from the source, `log_rows.py` from the change log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import pyarrow as pa

from cdc.config import Transform
from cdc.config.sinks import DefinedSink
from cdc.errors import HiddenColumnRenamed, TransformFailed
from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.postgres.key_range_digests import Digest, KeyRange, can_digest, count_rows, digest_rows, range_rows
from cdc.table import Column, TableSchema
from cdc.targets.hidden_columns import check_hidden, rules_of_sink
from cdc.targets.search_server.document_values import normal_json
from pipelines.transform.table_transform import TableTransform
from pipelines.verification.canonical_text import source_batch, text_batch, without_unrepresentable
from pipelines.verification.checksum import digest_column
from pipelines.verification.compare_rows import ComparedColumns, Rows
from pipelines.verification.consistent_cut import ConsistentCut

Masking = Callable[[pa.Array], pa.Array]
"""Function that masks an array of text; the result has the same length."""
_JSON_OIDS: Final = frozenset({114, 3802})
"""OIDs of json and jsonb."""
_FILTERED: Final = "the rule filters rows by an expression of Spark SQL, and verify does not evaluate expressions"


@dataclass(frozen=True, slots=True)
class ExpectedSchema:
    """The columns that the target of one table should have."""

    schema: TableSchema
    """The schema of the source table."""
    names: Mapping[int, str]
    """Column id → name in the target, for the columns that the target should have.

    The names are those before `cdc.target_names.column_name` escapes characters that Delta rejects.
    """
    masks: Mapping[int, Masking] = field(default_factory=dict)
    """Column id → mask, for each masked column."""
    refusal: str | None = None
    """Why the rows of the table cannot be compared; None if they can be compared."""
    not_compared: str | None = None
    """Text that names the columns that are not compared; None if all columns are compared."""
    nulled: frozenset[int] = frozenset()
    """Ids of the columns whose values are NULL in the target if their type there cannot represent them."""
    may_omit_columns: bool = False
    """Whether the target may be without some of the columns, because the sink ignores schema changes of the source."""

    @property
    def key(self) -> list[str]:
        """Names of the key columns in the target."""
        return [self.names[column.id] for column in self.schema.key if column.id in self.names]

    def mask(self, column: Column, kind: pa.DataType) -> Masking | None:
        """Return the function from the texts of a column to those that the target should have; None: no change.

        kind: the type of the column in the target.
        """
        if column.id in self.nulled and (pa.types.is_temporal(kind) or pa.types.is_decimal(kind)):
            return without_unrepresentable
        return self.masks.get(column.id)

    @classmethod
    def of(cls, sink: DefinedSink, schema: TableSchema) -> ExpectedSchema:
        """Return the columns that the target should have by the sink's settings and the table's rule.

        schema: the schema of the source table.
        """
        wanted = {column.id: column.name for column in sink.selected_columns(schema).sent}
        rule, may_omit = sink.rule(schema.topic), sink.may_omit_columns(schema.topic)
        transform = None if rule is None else rule.transform
        try:
            check_hidden(schema, rules_of_sink(sink))
        except HiddenColumnRenamed as exc:
            return cls(schema, wanted, refusal=exc.message)
        forms = _json_forms(schema) if sink.normalizes_json else {}
        nulled = sink.nulled_columns(schema)
        if transform is None:
            return cls(schema, wanted, forms, nulled=nulled, may_omit_columns=may_omit)
        try:
            transformed = TableTransform.of(transform, schema)
        except TransformFailed as exc:
            return cls(schema, wanted, refusal=exc.message)
        names = {column.id: column.name for column in transformed.schema.sent if column.id in wanted}
        return cls(
            schema,
            names,
            {**forms, **transformed.masks},
            refusal=_refusal(transform),
            not_compared=_not_compared(transform),
            nulled=nulled,
            may_omit_columns=may_omit,
        )


def _json_forms(schema: TableSchema) -> dict[int, Masking]:
    """Return column id → function that makes JSON texts as the documents of a search server show them."""
    return {column.id: _normal_json for column in schema.sent if column.value_type[0] in _JSON_OIDS}


def _normal_json(texts: pa.Array) -> pa.Array:
    return pa.array([None if text is None else normal_json(text) for text in texts.to_pylist()], pa.string())


def _refusal(rule: Transform) -> str | None:
    if rule.python is not None:
        return f"function {rule.python!r} of the rule can change any column except the key, and verify does not call it"
    return None if rule.where is None else _FILTERED


def _not_compared(rule: Transform) -> str | None:
    return f"computed columns are not compared: {sorted(rule.computed)!r}" if rule.computed else None


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """Which columns of a table are compared, and their types and masks in the target."""

    schema: TableSchema
    """The schema of the source table, as the publication sends it."""
    indices: tuple[int, ...]
    """Indices of the compared columns among the sent columns."""
    kinds: tuple[pa.DataType, ...]
    """Types of the compared columns in the target."""
    masks: tuple[Masking | None, ...]
    """Masks of the compared columns; None for a column without a mask."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the compared columns at the source."""
        return tuple(self.schema.sent[index].name for index in self.indices)

    def masked(self, texts: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of canonical text with the masks applied, as the target should have them."""
        if not any(self.masks):
            return texts
        return text_batch(
            [text if mask is None else mask(text) for text, mask in zip(texts.columns, self.masks, strict=True)]
        )

    @property
    def shape(self) -> ComparedColumns:
        """The names of the compared columns, and which of them are key columns. All key columns must be among them."""
        names = self.names
        return ComparedColumns(names, tuple(names.index(column.name) for column in self.schema.key))


class ExpectedRows(Protocol):
    """The rows that the target of one table should contain."""

    def rows(self, wanted: ComparedRows, within: KeyRange | None = None) -> Rows:
        """Read the compared columns as canonical text; within: a range of keys, None for all rows."""

    def count(self, wanted: ComparedRows, within: KeyRange | None = None) -> int:
        """Return the number of rows in a range of keys, or of all rows."""

    def digest(self, wanted: ComparedRows, within: KeyRange | None = None) -> Digest | None:
        """Return the digest of the columns; None if the digest cannot be computed without reading the rows."""


class SourceRows:
    """The expected rows of a table: its rows in the source at a cut."""

    def __init__(self, cut: ConsistentCut) -> None:
        self._cut = cut

    def rows(self, wanted: ComparedRows, within: KeyRange | None = None) -> Rows:
        """Read the compared columns as canonical text; within: a range of keys, None for all rows."""
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
                    yield wanted.masked(source_batch(batch, wanted.indices, wanted.kinds))
            decoder.finish()

        return rows

    def count(self, wanted: ComparedRows, within: KeyRange | None = None) -> int:
        """Return the number of rows, which the source server counts."""
        return count_rows(self._cut.source, wanted.schema, self._cut.publication, within)

    def digest(self, wanted: ComparedRows, within: KeyRange | None = None) -> Digest | None:
        """Return the digest of the columns, which the source server computes.

        None if a column has a mask, or if the server cannot compute the digest of a column.
        """
        sent = [wanted.schema.sent[index] for index in wanted.indices]
        pairs = zip(sent, wanted.kinds, strict=True)
        columns = [digest_column(column, kind) for column, kind in pairs]
        known = [column for column in columns if column is not None]
        if any(wanted.masks) or len(known) < len(columns) or not can_digest(self._cut.source):
            return None
        return digest_rows(self._cut.source, wanted.schema, self._cut.publication, known, within)


class ReadRateLimit:
    """Limits the rows that are read per second, for all tables together; a rate of None is no limit."""

    def __init__(
        self,
        rate: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = rate
        self._clock, self._pause = clock, pause
        self._due = 0.0

    def wait(self, rows: int) -> None:
        """Wait as long as the rate limit requires after reading this number of rows.

        Without a limit, still call `pause` with 0 seconds, because `pause` may raise an exception to stop the process.
        """
        if not self.rate:
            self._pause(0.0)
            return
        now = self._clock()
        self._due = max(self._due, now) + rows / self.rate
        self._pause(self._due - now)


class RateLimitedRows:
    """The expected rows of a table, read no faster than a rate limit allows."""

    def __init__(self, expected: ExpectedRows, limit: ReadRateLimit) -> None:
        self._expected, self._limit = expected, limit

    def rows(self, wanted: ComparedRows, within: KeyRange | None = None) -> Rows:
        """Read the columns as canonical text, and wait after every batch to stay within the rate limit."""
        read = self._expected.rows(wanted, within)

        def rows() -> Iterator[pa.RecordBatch]:
            for batch in read():
                yield batch
                self._limit.wait(batch.num_rows)

        return rows

    def count(self, wanted: ComparedRows, within: KeyRange | None = None) -> int:
        """Count the rows, wait as long as reading them would take at the rate limit, and return their number."""
        rows = self._expected.count(wanted, within)
        self._limit.wait(rows)
        return rows

    def digest(self, wanted: ComparedRows, within: KeyRange | None = None) -> Digest | None:
        """Compute the digest, wait as long as reading its rows would take at the rate limit, and return the digest."""
        digest = self._expected.digest(wanted, within)
        if digest is not None:
            self._limit.wait(digest.rows)
        return digest
