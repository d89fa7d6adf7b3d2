"""Comparison of one table of one sink with its expected rows: by count, by digest or row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from cdc.errors import SinkUnavailable
from cdc.postgres.key_range_digests import KeyRange, is_ordered_by_bytes
from cdc.table import Column, TableSchema
from cdc.targets.published_record import TableRecord, TargetState
from cdc.targets.sink_reading import refusal_reason
from cdc.verify_and_replay_options import VerifyMode
from pipelines.verification.canonical_text import literal_text, source_text
from pipelines.verification.checksum import digest_of
from pipelines.verification.compare_rows import LISTED, Mismatches, Rows, compare
from pipelines.verification.expected_rows import ComparedRows, ExpectedRows, ExpectedSchema
from pipelines.verification.target_rows import TargetRows

_DIGESTS_DIFFER: Final = "the digests differ; run with --mode rows to list the keys"
_INTEGER_OIDS: Final = {20, 21, 23}
_UUID_OID: Final = 2950
_TEXT_OIDS: Final = {25, 1043}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableVerdict:
    """The result for one table of one sink; its fields are those of the JSON output."""

    sink: str
    topic: str
    equal: bool
    """Whether no mismatch was found; parked keys are not compared."""
    rows: int = 0
    """Number of expected rows at the cut."""
    target_rows: int = 0
    """Number of rows in the target."""
    state: str = TargetState.STREAMING.value
    """A TargetState, `absent` when the sink does not list the table, or `unreadable` when its store cannot be read."""
    reason: str | None = None
    """Why the table was not compared, or only in part, or which columns the target does not have."""
    mode: str = VerifyMode.ROWS.value
    """The mode in which the table was compared; it can differ from the requested one."""
    compared: bool = False
    """Whether the table was compared; if not, `reason` says why."""
    missing: list[list[str | None]] = field(default_factory=list)
    """The first keys that are not in the target."""
    extra: list[list[str | None]] = field(default_factory=list)
    """The first keys that are only in the target."""
    differing: list[dict[str, Any]] = field(default_factory=list)
    """{"key", "columns"} of the first rows whose values differ from the expected ones."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of mismatches by kind (`missing`, `extra`, `differing`); lower bounds unless `complete`."""
    complete: bool = True
    """Whether every mismatch was counted."""
    parked: int = 0
    """Number of keys with dead letters. Their rows are older than the cut, so they are not compared."""
    parked_keys: list[list[str]] = field(default_factory=list)
    """The first keys with dead letters."""

    @property
    def mismatched(self) -> int:
        """Number of rows that are known to differ. It is 0 for an equal table, and at least 1 for a table that is not
        equal.
        """
        found = sum(self.counts.values()) or abs(self.rows - self.target_rows)
        return 0 if self.equal else max(1, found)


def refused(sink: str, topic: str, state: str, reason: str) -> TableVerdict:
    """Return the verdict of a table that was not compared, with the reason."""
    return TableVerdict(sink=sink, topic=topic, equal=False, state=state, reason=reason)


@dataclass(frozen=True, slots=True)
class TableComparison:
    """Compares the target of one table in one sink with its expected rows."""

    sink: str
    record: TableRecord
    expected: ExpectedSchema
    expected_rows: ExpectedRows
    target: TargetRows

    @property
    def schema(self) -> TableSchema:
        """The schema of the source table."""
        return self.expected.schema

    def __call__(self, mode: VerifyMode, *, within: KeyRange | None = None, listed: int = LISTED) -> TableVerdict:
        """Compare a range of keys, or all rows; listed: maximum number of keys to list for each kind of mismatch."""
        try:
            return self._verdict(mode, within, listed)
        except SinkUnavailable as exc:
            return self._refused(refusal_reason(exc))

    def _verdict(self, mode: VerifyMode, within: KeyRange | None, listed: int) -> TableVerdict:
        refusal = self.target.refusal or self.expected.refusal
        if refusal is not None:
            return self._refused(refusal)
        sent = self.schema.sent
        if not sent:  # without columns all rows are equal, so the number of rows is the whole comparison
            return self._compare_counts(mode, ComparedRows(self.schema, (), (), ()), within)
        present = [index for index, column in enumerate(sent) if self.kind(column) is not None]
        absent = [column.name for column in sent if column.id in self.expected.names and self.kind(column) is None]
        if not present or not {column.name for column in self.schema.key} <= {sent[index].name for index in present}:
            return self._refused(f"rows cannot be compared, because the target does not have the columns {absent!r}")
        kinds = tuple(kind for column in sent if (kind := self.kind(column)) is not None)
        masks = tuple(self.expected.mask(sent[index], kind) for index, kind in zip(present, kinds, strict=True))
        wanted = ComparedRows(self.schema, tuple(present), kinds, masks)
        # counts and digests would include the rows of parked keys, which are not compared
        found = None if self.record.parked else self._compare_totals(mode, wanted, within)
        if found is None:
            found = self._compare_row_by_row(wanted, within, listed)
        if absent and self.expected.may_omit_columns:
            return replace(
                found, reason=f"the target has no columns {absent!r}, and 'schema_changes: ignore' permits that"
            )
        if absent:
            return replace(found, equal=False, reason=f"the target has no columns {absent!r}")
        not_compared = self.expected.not_compared
        return found if not_compared is None else replace(found, reason=found.reason or not_compared)

    def kind(self, column: Column) -> pa.DataType | None:
        """Return the type of a source column in the target; None if it is not in the target or should not be there."""
        name = self.expected.names.get(column.id)
        return None if name is None else self.target.kind(name)

    def range_column(self, source: Any) -> str | None:
        """Return the key column that divides source and target into the same ranges of keys; None if no column does."""
        if not self.schema.key or not self.target.reads_ranges or (kind := self.kind(self.schema.key[0])) is None:
            return None
        return self.schema.key[0].name if in_same_order(source, self.schema, kind) else None

    def _target_rows(self, wanted: ComparedRows, within: KeyRange | None) -> Rows:
        return self.target.rows(self._target_names(wanted.names), self._target_range(within))

    def _count_target(self, wanted: ComparedRows, within: KeyRange | None) -> int:
        return self.target.count(self._target_names(wanted.names), self._target_range(within))

    def _target_names(self, names: Sequence[str]) -> list[str]:
        ids = {column.name: column.id for column in self.schema.sent}
        return [self.expected.names[ids[name]] for name in names]

    def _target_range(self, within: KeyRange | None) -> KeyRange | None:
        return None if within is None else replace(within, column=self._target_names([within.column])[0])

    def _compare_totals(self, mode: VerifyMode, wanted: ComparedRows, within: KeyRange | None) -> TableVerdict | None:
        """Compare only counts or digests, if `mode` permits; return None if the rows themselves must be compared."""
        if mode is VerifyMode.COUNT:
            return self._compare_counts(mode, wanted, within)
        if mode is not VerifyMode.CHECKSUM or (expected := self.expected_rows.digest(wanted, within)) is None:
            return None
        actual = digest_of(self._target_rows(wanted, within)())
        verdict = self._compared(mode, expected == actual, expected.rows, actual.rows)
        return verdict if verdict.equal else replace(verdict, reason=_DIGESTS_DIFFER)

    def _compare_counts(self, mode: VerifyMode, wanted: ComparedRows, within: KeyRange | None) -> TableVerdict:
        rows, target_rows = self.expected_rows.count(wanted, within), self._count_target(wanted, within)
        return self._compared(mode, rows == target_rows, rows, target_rows)

    def _compare_row_by_row(self, wanted: ComparedRows, within: KeyRange | None, listed: int) -> TableVerdict:
        shape = wanted.shape
        kinds = [wanted.kinds[index] for index in shape.identity]
        parked = _canonical_keys(self.record.parked, kinds)
        sides = self.expected_rows.rows(wanted, within), self._target_rows(wanted, within)
        found = compare(*sides, shape, listed, parked)
        _make_keys_literals(found.mismatches, kinds)
        verdict = self._compared(VerifyMode.ROWS, found.equal, found.source_rows, found.target_rows)
        excluded = {"parked": len(parked), "parked_keys": [list(key) for key in self.record.parked[:listed]]}
        return replace(verdict, **asdict(found.mismatches), **excluded)  # type: ignore[arg-type]

    def _compared(self, mode: VerifyMode, equal: bool, rows: int, target_rows: int) -> TableVerdict:  # noqa: FBT001
        return TableVerdict(
            sink=self.sink,
            topic=self.record.topic,
            equal=equal,
            rows=rows,
            target_rows=target_rows,
            state=self.record.state,
            mode=mode.value,
            compared=True,
        )

    def _refused(self, reason: str) -> TableVerdict:
        return refused(self.sink, self.record.topic, self.record.state, reason)


def in_same_order(source: Any, schema: TableSchema, kind: pa.DataType) -> bool:
    """Return whether the source's index and a target column of type `kind` sort the first key column alike."""
    column = schema.key[0]
    type_oid = column.value_type[0]
    if pa.types.is_integer(kind):
        return type_oid in _INTEGER_OIDS
    if not (pa.types.is_string(kind) or pa.types.is_string_view(kind) or pa.types.is_large_string(kind)):
        return False
    return type_oid == _UUID_OID or (type_oid in _TEXT_OIDS and is_ordered_by_bytes(source, schema, column.name))


def _make_keys_literals(found: Mismatches, kinds: Sequence[pa.DataType]) -> None:
    """Replace the canonical text in the listed keys by literals that the source accepts."""
    for key in (*found.missing, *found.extra, *(entry["key"] for entry in found.differing)):
        key[:] = [literal_text(text, kind) for text, kind in zip(key, kinds, strict=True)]


def _canonical_keys(keys: Sequence[Sequence[str]], kinds: Sequence[pa.DataType]) -> frozenset[tuple[str | None, ...]]:
    """Convert keys, which are texts of the source, to canonical text."""
    if not keys:
        return frozenset()
    parts = [
        source_text(pa.array([key[index] for key in keys], pa.string()), kind).to_pylist()
        for index, kind in enumerate(kinds)
    ]
    return frozenset(zip(*parts, strict=True))
