"""Inspection: one table of one sink held against what it should be, as closely as was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import pyarrow as pa

from cdc.config.job_options import VerifyMode
from cdc.errors import SinkUnavailable
from cdc.postgres.key_ranges import KeyRange
from cdc.stores.published import TableRecord
from cdc.table import Column, TableSchema
from pipelines.verification.canonical_text import source_text, source_words
from pipelines.verification.compare_rows import LISTED, Differences, Rows, compare
from pipelines.verification.digest import digest_of
from pipelines.verification.expected_schema import ExpectedSchema
from pipelines.verification.reference import ComparedRows, Reference
from pipelines.verification.schedule import in_same_order
from pipelines.verification.target_rows import TargetRows, why
from pipelines.verification.verdict import TableVerdict

_UNTOLD: Final = "the digests differ; --mode rows names the keys"


@dataclass(frozen=True, slots=True)
class TableComparison:
    """What is held against what."""

    sink: str
    record: TableRecord
    like: ExpectedSchema
    """What the target should be like."""
    reference: Reference
    target: TargetRows

    @property
    def schema(self) -> TableSchema:
        """Of the source, as it should be in the target."""
        return self.like.schema

    def __call__(self, mode: VerifyMode, *, within: KeyRange | None = None, listed: int = LISTED) -> TableVerdict:
        """The verdict over a range, or all rows."""
        try:
            return self._verdict(mode, within, listed)
        except SinkUnavailable as exc:
            return self._refused(why(exc))

    def _verdict(self, mode: VerifyMode, within: KeyRange | None, listed: int) -> TableVerdict:
        refusal = self.target.refusal or self.like.refusal
        if refusal is not None:
            return self._refused(refusal)
        sent = self.schema.sent
        if not sent:  # its rows are equal to each other: as many are the same multiset
            return self._counted(mode, ComparedRows(self.schema, (), (), ()), within)
        present = [place for place, column in enumerate(sent) if self.kind(column) is not None]
        lacking = [column.name for column in sent if column.id in self.like.names and self.kind(column) is None]
        if not present or not {column.name for column in self.schema.key} <= {sent[place].name for place in present}:
            return self._refused(f"the target does not have these key columns: {lacking!r}")
        kinds = tuple(kind for column in sent if (kind := self.kind(column)) is not None)
        masks = tuple(self.like.masks.get(sent[place].id) for place in present)
        wanted = ComparedRows(self.schema, tuple(present), kinds, masks)
        # of parked keys nothing is said, so the rows of the others have to be told from theirs
        found = None if self.record.parked else self._by_figures(mode, wanted, within)
        if found is None:
            found = self._by_rows(wanted, within, listed)
        if lacking and self.like.may_lack:
            return replace(found, reason=f"the target has no columns {lacking!r}, as schema_changes permits")
        if lacking:
            return replace(found, equal=False, reason=f"the target does not have these columns: {lacking!r}")
        return found if self.like.untold is None else replace(found, reason=found.reason or self.like.untold)

    def kind(self, column: Column) -> pa.DataType | None:
        """The target's type of a column; None if it should not or does not have it."""
        name = self.like.names.get(column.id)
        return self.target.kind(name) if name is not None and self.target.has(name) else None

    def range_column(self, source: Any) -> str | None:
        """The column by which both sides are cut into the same ranges, None if there is none."""
        if not self.schema.key or not self.target.ranged or (kind := self.kind(self.schema.key[0])) is None:
            return None
        return self.schema.key[0].name if in_same_order(source, self.schema, kind) else None

    def _rows(self, wanted: ComparedRows, within: KeyRange | None) -> Rows:
        return self.target.rows(self._called(wanted.names), self._there(within))

    def _count(self, wanted: ComparedRows, within: KeyRange | None) -> int:
        return self.target.count(self._called(wanted.names), self._there(within))

    def _called(self, names: Sequence[str]) -> list[str]:
        """Names of columns in the target."""
        ids = {column.name: column.id for column in self.schema.sent}
        return [self.like.names[ids[name]] for name in names]

    def _there(self, within: KeyRange | None) -> KeyRange | None:
        return None if within is None else replace(within, column=self._called([within.column])[0])

    def _by_figures(self, mode: VerifyMode, wanted: ComparedRows, within: KeyRange | None) -> TableVerdict | None:
        """The verdict without the rows of the reference, None if they are needed."""
        if mode is VerifyMode.COUNT:
            return self._counted(mode, wanted, within)
        if mode is not VerifyMode.CHECKSUM or (ours := self.reference.digest(wanted, within)) is None:
            return None
        theirs = digest_of(self._rows(wanted, within)())
        verdict = self._said(mode, ours == theirs, ours.rows, theirs.rows)
        return verdict if verdict.equal else replace(verdict, reason=_UNTOLD)

    def _counted(self, mode: VerifyMode, wanted: ComparedRows, within: KeyRange | None) -> TableVerdict:
        rows, target_rows = self.reference.count(wanted, within), self._count(wanted, within)
        return self._said(mode, rows == target_rows, rows, target_rows)

    def _by_rows(self, wanted: ComparedRows, within: KeyRange | None, listed: int) -> TableVerdict:
        shape = wanted.shape
        kinds = [wanted.kinds[place] for place in shape.identity]
        parked = _in_words(self.record.parked, kinds)
        sides = self.reference.rows(wanted, within), self._rows(wanted, within)
        found = compare(*sides, shape, listed, parked)
        readable(found.differences, kinds)
        said = self._said(VerifyMode.ROWS, found.equal, found.source_rows, found.target_rows)
        apart = {"parked": len(parked), "parked_keys": [list(key) for key in self.record.parked[:listed]]}
        return replace(said, **asdict(found.differences), **apart)  # type: ignore[arg-type]

    def _said(self, mode: VerifyMode, equal: bool, rows: int, target_rows: int) -> TableVerdict:  # noqa: FBT001
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

    def _refused(self, why: str) -> TableVerdict:
        return refused(self.sink, self.record.topic, self.record.state, why)


def refused(sink: str, topic: str, state: str, why: str) -> TableVerdict:
    """The verdict of a table that was not compared."""
    return TableVerdict(sink=sink, topic=topic, equal=False, state=state, reason=why)


def readable(found: Differences, kinds: Sequence[pa.DataType]) -> None:
    """Name keys in words that the source takes, where they were compared in others."""
    for key in (*found.missing, *found.extra, *(entry["key"] for entry in found.differing)):
        key[:] = [source_words(text, kind) for text, kind in zip(key, kinds, strict=True)]


def _in_words(keys: Sequence[Sequence[str]], kinds: Sequence[pa.DataType]) -> frozenset[tuple[str | None, ...]]:
    """Keys as the source prints them, in the words that they are compared in."""
    if not keys:
        return frozenset()
    parts = [
        source_text(pa.array([key[place] for key in keys], pa.string()), kind).to_pylist()
        for place, kind in enumerate(kinds)
    ]
    return frozenset(zip(*parts, strict=True))
