"""verify: is every row and column of every sink what the source holds at the same instant.

Exact while the workload runs: proof.cut brings source and sinks to one position, proof.compare reads
both sides there. Nothing of the sinks' own conversion is used; what is equal here is equal twice told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import pyarrow as pa

from cdc.catalog import Catalog
from cdc.config import Definition, DeltaSink, SearchSink
from cdc.errors import ConfigError, CutNotReached
from cdc.log.read import LogReader
from cdc.naming import column_name
from cdc.pgoutput.copy_text import CopyDecoder
from cdc.position import Position
from cdc.postgres.copy import copy_table
from cdc.postgres.tables import match_tables, read_schema
from cdc.stores.lake import read_target
from cdc.stores.published import TableRecord, TargetState
from cdc.stores.search import SearchIndex
from cdc.table import TableSchema, matches, named
from pipelines.proof.canonical import source_words
from pipelines.proof.compare import LISTED, Comparison, Differences, Rows, Shape, compare
from pipelines.proof.cut import ConsistentCut, CutRequest, Kept, consistent_cut
from pipelines.proof.sides import document_batches, source_batch, target_batch

TIMEOUT: Final = 60.0
"""Seconds until the sinks have to stand at the cut."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to verify; empty means all."""

    tables: tuple[str, ...] = ()
    """Globs over `schema.table`; a bare name means that table in any schema."""
    sinks: tuple[str, ...] = ()
    timeout: float = TIMEOUT
    listed: int = LISTED
    """Keys named per kind of difference, per table and sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableVerdict:
    """One table in one sink."""

    sink: str
    topic: str
    equal: bool
    rows: int = 0
    """In the source, at the cut."""
    target_rows: int = 0
    state: str = TargetState.STREAMING.value
    """A TargetState, or `absent` when the sink does not list the table."""
    reason: str | None = None
    """Why nothing was compared, or what the target lacks."""
    missing: list[list[str | None]] = field(default_factory=list)
    """Keys that only the source has, the first of them."""
    extra: list[list[str | None]] = field(default_factory=list)
    """Keys that only the target has, the first of them."""
    differing: list[dict[str, Any]] = field(default_factory=list)
    """{"key", "columns"} of rows that differ, the first of them."""
    counts: dict[str, int] = field(default_factory=dict)
    """How many of each, all counted while `complete`."""
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one run."""

    position: Position
    tables: tuple[TableVerdict, ...]

    @property
    def equal(self) -> bool:
        """Every table in every sink."""
        return all(verdict.equal for verdict in self.tables)

    @property
    def summary(self) -> str:
        """One line for a person."""
        equal = sum(verdict.equal for verdict in self.tables)
        rows = sum(verdict.rows for verdict in self.tables)
        return f"{equal}/{len(self.tables)} tables equal, {rows:,} rows at {self.position}"

    def to_json(self) -> dict[str, Any]:
        """The envelope's result."""
        return {"position": str(self.position), "tables": [asdict(verdict) for verdict in self.tables]}


def verify(definition: Definition, options: VerifyOptions) -> Report:
    """Compare; raises CutNotReached when the sinks cannot be brought to one position with the source."""
    sinks = [sink for sink in definition.sinks if not options.sinks or sink.name in options.sinks]
    if unknown := set(options.sinks) - {sink.name for sink in sinks}:
        names = [sink.name for sink in definition.sinks]
        raise ConfigError(f"unknown sink {min(unknown)!r}: expected one of {names!r}")
    if not sinks:
        raise ConfigError("the definition has no sink", remedy="add a sink under 'sinks'")
    durable = LogReader(definition.log.path).durable
    if durable is None:
        raise CutNotReached("the log is still empty: its first snapshot has not ended")
    wish = CutRequest(
        pipeline=definition.name,
        dsn=definition.source.dsn.reveal(),
        sinks=[sink.name for sink in sinks],
        patterns=definition.patterns,
        exclude=definition.excludes,
        epoch=durable.epoch,
        timeout=options.timeout,
    )
    with Catalog.open(definition.catalog.url) as catalog, consistent_cut(catalog, wish) as cut:
        captured = match_tables(cut.source, definition.patterns, definition.excludes)
        tables = [(oid, str(name)) for oid, name in captured]
        verdicts = [
            v for sink in sinks for v in _sink(cut, sink, _wanted(tables, sink.tables, options.tables), options.listed)
        ]
    if not verdicts:
        raise ConfigError(f"no captured table matches {list(options.tables)!r}", remedy="'cdc status' lists the tables")
    return Report(cut.position, tuple(verdicts))


def _wanted(tables: Sequence[tuple[int, str]], of_sink: Sequence[str], asked: Sequence[str]) -> list[tuple[int, str]]:
    return [(oid, topic) for oid, topic in tables if matches(topic, of_sink) and (not asked or named(topic, asked))]


def _sink(
    cut: ConsistentCut, sink: DeltaSink | SearchSink, tables: Sequence[tuple[int, str]], listed: int
) -> Iterator[TableVerdict]:
    kept = cut.sinks[sink.name]
    by_oid = {_oid(record): record for record in kept.record.tables.values()}
    for oid, topic in tables:
        record = by_oid.get(oid)
        if record is None:
            why = "the sink does not list the table"
            yield TableVerdict(sink=sink.name, topic=topic, equal=False, state="absent", reason=why)
        elif record.state != TargetState.STREAMING or record.position != cut.position:
            why = record.reason or _unready(record)
            yield TableVerdict(sink=sink.name, topic=topic, equal=False, state=record.state, reason=why)
        else:
            yield _table(cut, sink, kept, record, listed)


def _unready(record: TableRecord) -> str:
    if record.state == TargetState.SNAPSHOTTING:
        return "a full copy of the table has not ended"
    return f"stands at {Position(record.position)}"


def _oid(record: TableRecord) -> int:
    """OID of now; without a schema that of the first sight, which is the same inside the first epoch."""
    return record.relation & 0xFFFFFFFF if record.schema is None else TableSchema.from_json(record.schema).oid


def _table(
    cut: ConsistentCut, sink: DeltaSink | SearchSink, kept: Kept, record: TableRecord, listed: int
) -> TableVerdict:
    schema = read_schema(cut.source, _oid(record), relation=record.relation)
    if schema is None or not schema.sent:
        why = "the source has no such table, or no column of it"
        return TableVerdict(sink=sink.name, topic=record.topic, equal=False, reason=why)
    target = _delta(kept.handle, record) if isinstance(sink, DeltaSink) else _documents(kept.handle, record)
    present = [place for place, column in enumerate(schema.sent) if target.has(column.name)]
    lacking = [column.name for column in schema.sent if not target.has(column.name)]
    if not set(lacking).isdisjoint(column.name for column in schema.key) or not present:
        why = f"the target lacks key columns: {lacking!r}"
        return TableVerdict(sink=sink.name, topic=record.topic, equal=False, reason=why)
    shape = shape_of(schema, present)
    kinds = [target.kind(name) for name in shape.columns]
    found = compare(_source(cut, schema, present, kinds), target.rows(shape.columns), shape, listed)
    readable(found.differences, [kinds[place] for place in shape.identity])
    return verdict(sink.name, record, found, lacking)


def shape_of(schema: TableSchema, present: Sequence[int]) -> Shape:
    """The compared columns (places among the sent ones) and where the key is among them."""
    columns = tuple(schema.sent[place].name for place in present)
    return Shape(columns, tuple(columns.index(column.name) for column in schema.key))


def readable(found: Differences, kinds: Sequence[pa.DataType]) -> None:
    """Name keys in words that the source takes, where they were compared in others."""
    for key in (*found.missing, *found.extra, *(entry["key"] for entry in found.differing)):
        key[:] = [source_words(text, kind) for text, kind in zip(key, kinds, strict=True)]


def verdict(sink: str, record: TableRecord, found: Comparison, lacking: Sequence[str]) -> TableVerdict:
    """What a comparison says of a table; a column that the target lacks makes it unequal."""
    return TableVerdict(
        sink=sink,
        topic=record.topic,
        equal=found.equal and not lacking,
        rows=found.source_rows,
        target_rows=found.target_rows,
        state=record.state,
        reason=f"the target lacks columns: {list(lacking)!r}" if lacking else None,
        **asdict(found.differences),
    )


def _source(cut: ConsistentCut, schema: TableSchema, places: Sequence[int], kinds: Sequence[pa.DataType]) -> Rows:
    def rows() -> Iterator[pa.RecordBatch]:
        decoder = CopyDecoder(schema, position=cut.position, xid=0, committed_at=0, first_ordinal=0)
        for chunk in copy_table(cut.source, schema):
            batch = decoder.feed(chunk)
            if batch is not None:
                yield source_batch(batch, places, kinds)
        decoder.finish()

    return rows


class _DeltaTarget:
    """A Delta table at one version."""

    def __init__(self, target: str, version: int | None) -> None:
        self._target, self._version = target, version
        schema = read_target(target, version).schema
        self._kinds = dict(zip(schema.names, schema.types, strict=True))

    def has(self, name: str) -> bool:
        """Whether there is a column for that source column."""
        return column_name(name) in self._kinds

    def kind(self, name: str) -> pa.DataType:
        """The type of that column."""
        return self._kinds[column_name(name)]

    def rows(self, names: Sequence[str]) -> Rows:
        """Reads the columns as canonical text."""
        columns = [column_name(name) for name in names]

        def rows() -> Iterator[pa.RecordBatch]:
            return (target_batch(batch, columns) for batch in read_target(self._target, self._version))

        return rows


class _SearchTarget:
    """A table's documents in a kept index: values are text, as the source sent them."""

    def __init__(self, index: SearchIndex, topic: str) -> None:
        self._index, self._topic = index, topic

    def has(self, _name: str) -> bool:
        """A document holds every column of its table."""
        return True

    def kind(self, _name: str) -> pa.DataType:
        """Text."""
        return pa.string()

    def rows(self, names: Sequence[str]) -> Rows:
        """Reads the columns; a column that a document lacks is null."""

        def rows() -> Iterator[pa.RecordBatch]:
            return document_batches(self._index.documents(self._topic), names)

        return rows


def _delta(handle: str, record: TableRecord) -> _DeltaTarget:
    return _DeltaTarget(record.target, json.loads(handle).get(record.target, record.version))


def _documents(handle: str, record: TableRecord) -> _SearchTarget:
    return _SearchTarget(SearchIndex.open(handle), record.topic)
